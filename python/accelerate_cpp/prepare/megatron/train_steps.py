"""The kinds of models that the engine trains: their batches, their forward passes, their losses."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.prepare.megatron.calls import IGNORED, BertCall, Call, GPTCall, T5Call
from accelerate_cpp.prepare.megatron.groups import share_of_sequences

__all__ = ["AbstractTrainStep", "BertTrainStep", "GPTTrainStep", "T5TrainStep", "knows_tokens", "tokens_counted"]

Reported = dict[str, Any]
LossFunction = Callable[..., tuple[Tensor, Reported]]
ForwardStep = Callable[[Iterator[Any], Any], tuple[Any, LossFunction]]


class AbstractTrainStep(ABC):
    """How a kind of model is trained; subclasses provide the functions that the engine calls.

    A subclass sets ``forward_step``: it takes an iterator over micro-batches and the model, and returns what the model
    returned, and the function that computes from it the loss, a mean, and a dict of what is reported: losses without
    dimensions, which are averaged, tuples of a sum and what it is divided by, or tensors with the rows of the batch.

    Args:
        name: the name of the kind.

    Attributes:
        model_output_class: in which :class:`.engine.MegatronEngine` returns the loss; ``None`` returns it alone.
    """

    model_output_class: type[Any] | None = None
    forward_step: ForwardStep

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def _missing(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no {method}; a subclass of AbstractTrainStep defines it")

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """The function that gets a batch from a loader."""
        raise self._missing("get_batch_func")

    def get_forward_step_func(self) -> Any:
        """The function that runs the forward pass."""
        raise self._missing("get_forward_step_func")

    def get_loss_func(self, accelerator: Any) -> Any:
        """The function that computes the loss."""
        raise self._missing("get_loss_func")

    def call(self) -> Call | None:
        """How the model of transformers is called as train steps call it; ``None`` calls it as it is."""
        return None


def _use_custom(accelerator: Any, field: str) -> Any:
    """What the plugin of ``accelerator`` has in ``field``, to be used instead of the kind's own."""
    return getattr(accelerator.state.megatron_lm_plugin, field)


def _mean_over(losses: Tensor, mask: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The mean of losses that count, and a pair of their sum and number."""
    mask = mask.reshape(-1).float()
    total, count = torch.sum(losses.float().reshape(-1) * mask), mask.sum()
    return total / count.clamp(min=1), (total.detach(), count)


def _output_class(args: Any, name: str) -> type[Any] | None:
    if not args.model_return_dict:
        return None
    from transformers import modeling_outputs

    found: type[Any] = getattr(modeling_outputs, name)
    return found


class GPTTrainStep(AbstractTrainStep):
    """Trains decoders to predict the next token.

    The token after the last one of a row is the end of a text. Tokens that are such ends themselves predict nothing,
    and neither do those whose ``labels`` in the batch, if it has any, are -100.

    Args:
        accelerator: of the run.
        args: the options of the model, ``MegatronLMPlugin.megatron_lm_default_args``, as attributes.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("GPTTrainStep")
        for option in ("reset_position_ids", "reset_attention_mask"):
            if getattr(args, option):
                raise InvalidArgument(
                    f"MegatronLMPlugin: other_megatron_args has {option}=True; texts that are packed into one row see "
                    "each other here: leave it out, or give each row one text"
                )
        self.eod_token = self.pad_token = args.eos_token_id
        self.eod_mask_loss = args.eod_mask_loss
        self._returns_logits = bool(args.return_logits)
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()
        self.model_output_class = _output_class(args, "CausalLMOutputWithCrossAttentions")

    def call(self) -> Call:
        return GPTCall(self._returns_logits)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """A function from an iterator to tokens, labels, the mask of the loss, that of attention, and positions.

        All have shape (rows, tokens); the mask of attention, 0 for padding, may be ``None``. Batches have
        ``input_ids``, or with ``megatron_dataset_flag`` ``text`` with one token more.
        """
        custom = _use_custom(accelerator, "custom_get_batch_function")
        if custom is not None:
            return custom
        split = share_of_sequences(accelerator)

        def get_batch(data_iterator: Iterator[Mapping[str, Tensor]]) -> tuple[Any, ...]:
            data = next(data_iterator)
            if megatron_dataset_flag:
                text = data["text"].long()
                tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
            else:
                tokens = data["input_ids"].long()
                labels = functional.pad(tokens[:, 1:], (0, 1), value=self.eod_token or 0)
            mask = torch.ones_like(tokens, dtype=torch.float)
            if self.eod_token is not None:
                mask[tokens == self.eod_token] = 0
            elif not megatron_dataset_flag:
                mask[:, -1] = 0  # there is no token that would follow
            if "labels" in data:
                mask[:, :-1][data["labels"][:, 1:] == IGNORED] = 0
            attention = data.get("attention_mask")
            positions = None
            if split is not None:
                if attention is not None and not bool(attention.all()):
                    raise InvalidArgument(
                        "MegatronEngine: context_parallel_size with padding in attention_mask, which no attention over "
                        "split sequences knows of; give rows of equal length without padding"
                    )
                attention = None
                positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
                tokens, labels, mask, positions = (split(one) for one in (tokens, labels, mask, positions))
            return tokens, labels, mask, attention, positions

        return get_batch

    def get_loss_func(self, accelerator: Any) -> LossFunction:
        """A function of the mask of the loss and of the losses of tokens, with ``return_logits`` and the logits."""
        return _loss_of_tokens(accelerator)

    def get_forward_step_func(self) -> ForwardStep:
        """A function from an iterator and the model to its outputs and the function that computes their loss."""

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, LossFunction]:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            output_tensor = model(tokens, position_ids, attention_mask, labels=labels)
            return output_tensor, partial(self.loss_func, loss_mask)

        return forward_step


class BertTrainStep(AbstractTrainStep):
    """Trains encoders to fill in masked tokens, and to tell the order of sentences, or to classify.

    Args:
        accelerator: of the run.
        args: as for :class:`GPTTrainStep`.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("BertTrainStep")
        self._pretraining, self.num_labels = bool(args.pretraining_flag), args.num_labels
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator, args.pretraining_flag, args.num_labels)
        self.forward_step = self.get_forward_step_func(args.pretraining_flag, args.bert_binary_head)
        self.model_output_class = _output_class(args, "SequenceClassifierOutput")

    def call(self) -> Call:
        return BertCall(self._pretraining)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """A function from an iterator to tokens, their types, the order of sentences, the mask of the loss, labels and
        the mask of padding, of shape (rows, tokens), but for the order, (rows,); each but the first and last may be
        ``None``."""
        custom = _use_custom(accelerator, "custom_get_batch_function")
        if custom is not None:
            return custom

        def get_batch(data_iterator: Iterator[Mapping[str, Tensor]]) -> tuple[Any, ...]:
            data = next(data_iterator)
            if megatron_dataset_flag:
                names = ("text", "types", "is_random", "loss_mask", "labels", "padding_mask")
                found = [data[name].long() for name in names]
                return (*found[:3], found[3].float(), *found[4:])
            labels = data.get("labels")
            if labels is None:
                raise InvalidArgument(
                    f"MegatronEngine: a batch with {', '.join(data)} for BERT; expected labels, too, -100 where they "
                    "do not count"
                )
            if not labels.is_floating_point():
                labels = labels.long()
            return (
                data["input_ids"].long(),
                data["token_type_ids"].long() if "token_type_ids" in data else None,
                data["next_sentence_label"].long() if "next_sentence_label" in data else None,
                (labels != IGNORED).float(),
                labels,
                data["attention_mask"].long() if "attention_mask" in data else torch.ones_like(data["input_ids"]),
            )

        return get_batch

    def get_loss_func(  # type: ignore[override]
        self, accelerator: Any, pretraining_flag: bool, num_labels: int
    ) -> LossFunction:
        """A function of the mask of the loss, the order of sentences and the outputs, or of labels and logits."""
        custom = _use_custom(accelerator, "custom_loss_function")
        if custom is not None:
            return custom  # type: ignore[no-any-return]

        @_mean_of_tokens
        def loss_func_pretrain(
            loss_mask: Tensor, sentence_order: Tensor | None, output_tensor: tuple[Tensor, Tensor | None]
        ) -> tuple[Tensor, Reported]:
            losses, order_logits = output_tensor
            loss, reported = _mean_over(losses, loss_mask)
            if order_logits is None or sentence_order is None:
                return loss, {"lm loss": reported}
            order_loss = functional.cross_entropy(
                order_logits.view(-1, 2).float(), sentence_order.view(-1), ignore_index=-1
            )
            return loss + order_loss, {"lm loss": reported, "sop loss": order_loss.detach()}

        def loss_func_finetune(labels: Tensor, logits: Tensor) -> tuple[Tensor, Reported]:
            if num_labels == 1:
                loss = functional.mse_loss(logits.view(-1), labels.view(-1))
            elif labels.is_floating_point():
                loss = functional.binary_cross_entropy_with_logits(logits, labels)
            else:
                loss = functional.cross_entropy(logits.view(-1, num_labels), labels.view(-1))
            return loss, {"loss": loss.detach()}

        return loss_func_pretrain if pretraining_flag else loss_func_finetune

    def get_forward_step_func(  # type: ignore[override]
        self, pretraining_flag: bool, bert_binary_head: bool
    ) -> ForwardStep:
        """As of :class:`GPTTrainStep`. Types of tokens are always given, whatever ``bert_binary_head`` is."""

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, LossFunction]:
            tokens, types, sentence_order, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
            if pretraining_flag:
                output_tensor = model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)
                return output_tensor, partial(self.loss_func, loss_mask, sentence_order)
            logits = model(tokens, padding_mask, tokentype_ids=types)
            return logits, partial(self.loss_func, labels)

        return forward_step


class T5TrainStep(AbstractTrainStep):
    """Trains encoders with decoders to predict the next token of what the decoder writes.

    Args:
        accelerator: of the run.
        args: as for :class:`GPTTrainStep`.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("T5TrainStep")
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()
        self.model_output_class = _output_class(args, "Seq2SeqLMOutput")

    def call(self) -> Call:
        return T5Call()

    @staticmethod
    def attn_mask_postprocess(attention_mask: Tensor) -> Tensor:
        """Where tokens of the encoder do not attend to each other, (rows, tokens, tokens); from 1 for tokens that are
        there, (rows, tokens)."""
        return attention_mask.unsqueeze(1) * attention_mask.unsqueeze(2) < 0.5

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device | str) -> Tensor:
        """Where tokens of the decoder do not attend to each other, (1, ``seq_length``, ``seq_length``)."""
        return torch.ones((1, seq_length, seq_length), dtype=torch.bool, device=device).triu(1)

    @staticmethod
    def get_enc_dec_mask(attention_mask: Tensor, dec_seq_length: int, device: torch.device | str) -> Tensor:
        """Where those of the decoder do not attend to those of the encoder, (rows, ``dec_seq_length``, tokens)."""
        rows, tokens = attention_mask.shape
        return (attention_mask.to(device).unsqueeze(1) < 0.5).expand(rows, dec_seq_length, tokens)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """A function from an iterator to the tokens of the encoder and the decoder, the mask of the loss, labels, and
        the masks of attention in the encoder, in the decoder, and between them."""
        custom = _use_custom(accelerator, "custom_get_batch_function")
        if custom is not None:
            return custom

        def get_batch(data_iterator: Iterator[Mapping[str, Tensor]]) -> tuple[Any, ...]:
            data = next(data_iterator)
            if megatron_dataset_flag:
                tokens = [data[name].long() for name in ("text_enc", "text_dec")]
                masks = [data[name] < 0.5 for name in ("enc_mask", "dec_mask", "enc_dec_mask")]
                return (*tokens, data["loss_mask"].float(), data["labels"].long(), *masks)
            tokens_enc, labels = data["input_ids"].long(), data["labels"].long()
            tokens_dec = data["decoder_input_ids"].long() if "decoder_input_ids" in data else _shifted(labels)
            there = data["attention_mask"].long() if "attention_mask" in data else torch.ones_like(tokens_enc)
            length, device = tokens_dec.shape[1], tokens_dec.device
            masks = [
                self.attn_mask_postprocess(there),
                self.get_decoder_mask(length, device),
                self.get_enc_dec_mask(there, length, device),
            ]
            return tokens_enc, tokens_dec, (labels != IGNORED).float(), labels, *masks

        return get_batch

    def get_loss_func(self, accelerator: Any) -> LossFunction:
        """A function of the mask of the loss and of the losses of tokens."""
        return _loss_of_tokens(accelerator)

    def get_forward_step_func(self) -> ForwardStep:
        """As of :class:`GPTTrainStep`."""

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, LossFunction]:
            tokens_enc, tokens_dec, loss_mask, labels, *masks = self.get_batch(data_iterator)
            output_tensor = model(tokens_enc, tokens_dec, *masks, tokentype_ids=None, lm_labels=labels)
            return output_tensor, partial(self.loss_func, loss_mask)

        return forward_step


def _shifted(labels: Tensor) -> Tensor:
    """What the decoder reads when it has to write ``labels``: the same one later, with 0 at first and for padding."""
    return functional.pad(labels[:, :-1], (1, 0)).masked_fill(functional.pad(labels[:, :-1], (1, 0)) == IGNORED, 0)


def _mean_of_tokens(function: LossFunction) -> LossFunction:
    """Notes that ``function`` returns a mean over its first argument, a mask."""
    function.is_mean_of_tokens = True  # type: ignore[attr-defined]
    return function


def _loss_of_tokens(accelerator: Any) -> LossFunction:
    """The program's own loss function, or one of the mask of the loss and the losses of tokens, or these and logits."""
    custom: LossFunction | None = _use_custom(accelerator, "custom_loss_function")
    if custom is not None:
        return custom

    @_mean_of_tokens
    def loss_func(loss_mask: Tensor, output_tensor: Any) -> tuple[Tensor, Reported]:
        losses, *logits = output_tensor if isinstance(output_tensor, tuple) else (output_tensor,)
        loss, reported = _mean_over(losses, loss_mask)
        return loss, {"lm loss": reported, **({"logits": logits[0].detach()} if logits else {})}

    return loss_func


def tokens_counted(loss_function: LossFunction) -> Tensor | None:
    """How many tokens of a micro-batch the mean that ``loss_function`` returns is over; ``None`` if that is unknown."""
    if not isinstance(loss_function, partial) or not getattr(loss_function.func, "is_mean_of_tokens", False):
        return None
    mask, *others = loss_function.args
    # With the order of sentences there is a loss of rows beside that of tokens.
    return None if mask is None or any(one is not None for one in others) else mask.sum()


def knows_tokens(step: AbstractTrainStep) -> bool:
    """Whether the loss functions of ``step`` say how many tokens they are over, before the model was called."""
    own = (GPTTrainStep, BertTrainStep, T5TrainStep)
    forward = type(step).get_forward_step_func
    marked = getattr(getattr(step, "loss_func", None), "is_mean_of_tokens", False)
    return bool(marked) and any(forward is kind.get_forward_step_func for kind in own)
