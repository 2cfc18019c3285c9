"""How train steps that are written for the models of Megatron-LM call those of transformers.

The models of Megatron-LM take their inputs in another order, and return the loss of each token instead of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from accelerate_cpp.errors import InvalidArgument

__all__ = ["BertCall", "Call", "GPTCall", "ModelCall", "Pending", "Recorder", "T5Call", "losses_of_tokens"]

IGNORED = -100
"""The label of tokens that do not count, as in transformers."""


def losses_of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of each token, float32 of shape (rows, tokens); 0 where the label is -100.

    Args:
        logits: (rows, tokens, vocabulary).
        labels: (rows, tokens), integers.
    """
    losses: Tensor = functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED
    )
    return losses.view(labels.shape)


class Call(Protocol):
    """One kind of model, as train steps call it."""

    def inputs(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What the model of transformers takes by name."""

    def outputs(self, found: Any, *args: Any, **kwargs: Any) -> Any:
        """What the model of Megatron-LM would return; ``found`` are outputs, or logits, of that of transformers."""


class GPTCall:
    """``model(tokens, position_ids, attention_mask, labels=None)``.

    Returns the loss of each token, shape (rows, tokens), with ``returns_logits`` together with the logits; or without
    labels the logits alone.
    """

    def __init__(self, returns_logits: bool = False) -> None:
        self._returns_logits = returns_logits

    def inputs(
        self, tokens: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None, **_labels: Any
    ) -> dict[str, Any]:
        if attention_mask is not None and attention_mask.ndim != 2:
            _require_causal(attention_mask)
            attention_mask = None
        given = {"input_ids": tokens, "attention_mask": attention_mask, "position_ids": position_ids}
        return {name: value for name, value in given.items() if value is not None}

    def outputs(self, found: Any, *_inputs: Any, labels: Tensor | None = None, **_named: Any) -> Any:
        logits = _logits(found)
        if labels is None:
            return logits
        losses = losses_of_tokens(logits, labels)
        return (losses, logits) if self._returns_logits else losses


class BertCall:
    """``model(tokens, padding_mask, tokentype_ids=None, lm_labels=None)``.

    Returns the loss of each token and the logits for the order of sentences, or ``None``; for a model that classifies,
    its logits.
    """

    def __init__(self, pretraining: bool) -> None:
        self._pretraining = pretraining

    def inputs(
        self, tokens: Tensor, padding_mask: Tensor, tokentype_ids: Tensor | None = None, **_labels: Any
    ) -> dict[str, Any]:
        given = {"input_ids": tokens, "attention_mask": padding_mask, "token_type_ids": tokentype_ids}
        return {name: value for name, value in given.items() if value is not None}

    def outputs(self, found: Any, *_inputs: Any, lm_labels: Tensor | None = None, **_named: Any) -> Any:
        if not self._pretraining:
            return _logits(found)
        logits = getattr(found, "prediction_logits", None)
        logits = _logits(found) if logits is None else logits
        losses = logits if lm_labels is None else losses_of_tokens(logits, lm_labels)
        return losses, getattr(found, "seq_relationship_logits", None)


class T5Call:
    """``model(tokens_enc, tokens_dec, enc_mask, dec_mask, enc_dec_mask, tokentype_ids=None, lm_labels=None)``.

    Masks are true where attention is not paid. Returns the loss of each token, or without labels the logits.
    """

    def inputs(
        self,
        tokens_enc: Tensor,
        tokens_dec: Tensor,
        enc_mask: Tensor,
        dec_mask: Tensor,
        enc_dec_mask: Tensor,
        **_named: Any,
    ) -> dict[str, Any]:
        _require_causal(dec_mask)
        return {
            "input_ids": tokens_enc,
            "attention_mask": (~enc_dec_mask[:, 0]).long(),
            "decoder_input_ids": tokens_dec,
        }

    def outputs(self, found: Any, *_inputs: Any, lm_labels: Tensor | None = None, **_named: Any) -> Any:
        return _logits(found) if lm_labels is None else losses_of_tokens(_logits(found), lm_labels)


def _logits(found: Any) -> Tensor:
    logits: Tensor = getattr(found, "logits", found)
    return logits


def _require_causal(mask: Tensor) -> None:
    """Raises InvalidArgument unless ``mask``, true where attention is not paid, hides what follows, and no more."""
    size = mask.shape[-1]
    expected = torch.ones(size, size, dtype=torch.bool, device=mask.device).triu(1)
    if mask.shape[-2] != size or not bool((mask.bool() == expected).all()):
        raise InvalidArgument(
            f"MegatronEngine: an attention mask of shape {list(mask.shape)} that hides more than the following tokens; "
            "models of transformers take masks of shape (rows, tokens), 0 for padding: return such a one from "
            "get_batch, or None"
        )


class ModelCall:
    """A model of transformers that is called as one of Megatron-LM.

    Args:
        call: ``None`` hands arguments and outputs on as they are, for models of the program's own.
    """

    def __init__(self, model: Callable[..., Any], call: Call | None) -> None:
        self._model, self._call = model, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is None:
            return self._model(*args, **kwargs)
        return self._call.outputs(self._model(**self._call.inputs(*args, **kwargs)), *args, **kwargs)


class Pending:
    """In place of outputs that only the process with the last stage will have."""


class Recorder:
    """In place of a model in stages: notes how it is called for one micro-batch.

    Args:
        call: how the model is called.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._arguments: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        self.pending = Pending()

    def __call__(self, *args: Any, **kwargs: Any) -> Pending:
        self._arguments = args, kwargs
        return self.pending

    def inputs(self, returned: Any) -> dict[str, Any]:
        """What the model takes; ``returned`` is what the train step returned as its outputs.

        Raises:
            InvalidArgument: the model was not called, or the train step has changed what it returned.
        """
        if self._arguments is None or returned is not self.pending:
            raise InvalidArgument(
                f"MegatronEngine: a train step returned a {type(returned).__name__} in place of what the model "
                "returned, which with pp_degree only the last stage has; return that, and change it in the loss"
            )
        args, kwargs = self._arguments
        return self._call.inputs(*args, **kwargs)

    def computed(self, model: Callable[..., Any], function: Any) -> tuple[Any, Any]:
        """What ``model`` returns for the call, and ``function``."""
        args, kwargs = self._arguments or ((), {})
        return model(*args, **kwargs), function

    def outputs(self, found: Any) -> Any:
        """What the model of Megatron-LM would have returned for the call."""
        args, kwargs = self._arguments or ((), {})
        return self._call.outputs(found, *args, **kwargs)
