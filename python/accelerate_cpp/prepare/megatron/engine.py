"""The engine that programs train through which were written for Megatron-LM: one call is a whole step."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.prepare.megatron.calls import ModelCall, Recorder
from accelerate_cpp.prepare.megatron.groups import DataGroup
from accelerate_cpp.prepare.megatron.micro_batches import chunks_of, rows_of, shares_of
from accelerate_cpp.prepare.megatron.schedule import MegatronSchedule
from accelerate_cpp.prepare.megatron.train_steps import (
    AbstractTrainStep,
    BertTrainStep,
    GPTTrainStep,
    LossFunction,
    T5TrainStep,
    knows_tokens,
    tokens_counted,
)

__all__ = ["MegatronEngine", "without_engine"]

_STEPS: dict[str, type[AbstractTrainStep]] = {"bert": BertTrainStep, "gpt": GPTTrainStep, "t5": T5TrainStep}
# Options that train steps read, where neither the plugin nor the kind of the model says anything.
_DEFAULTS: dict[str, Any] = {
    "model_return_dict": True,
    "return_logits": False,
    "pretraining_flag": True,
    "num_labels": 2,
    "eos_token_id": None,
    "vocab_file": None,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "consumed_train_samples": 0,
    "consumed_valid_samples": 0,
    "tensorboard_dir": None,
}


class MegatronEngine(torch.nn.Module):
    """A prepared model with its optimizer and schedule, as Megatron-LM trains them.

    ``engine(**batch)`` is a step while the engine is in training mode: the batch is divided into micro-batches, which
    pass forwards and backwards; gradients are averaged and clipped; the optimizer and the schedule step. In evaluation
    mode it only computes the loss. Batches are those of the process, with ``num_micro_batches`` times
    ``micro_batch_size`` rows, as prepared loaders yield them.

    Args:
        accelerator: of the run.
        model: a prepared one.
        optimizer: its prepared one; ``None`` if it is only evaluated.
        scheduler: steps after each step of the optimizer; may be ``None``.

    Attributes:
        module: a list of the model, as Megatron-LM has one for each part of the pipeline.
        base_model: the model.
        train_step_handler: an ``AbstractTrainStep``.

    Raises:
        InvalidArgument: models of its kind are not known, and there is no ``custom_train_step_class``.
    """

    def __init__(self, accelerator: Any, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
        super().__init__()
        plugin = accelerator.state.megatron_lm_plugin
        self.module = [model]
        self.base_model = model
        self.optimizer, self.scheduler = optimizer, scheduler
        self._accelerator, self._strategy = accelerator, accelerator._session.strategy
        self.args = SimpleNamespace(**_DEFAULTS | plugin.megatron_lm_default_args)
        self.args.bert_binary_head = self.args.pretraining_flag and self.args.num_labels == 2
        self._custom_model = plugin.custom_model_provider_function is not None
        self.train_step_handler = self._handler(plugin)
        self._count, self._clip = int(plugin.num_micro_batches or 1), float(plugin.gradient_clipping or 0)
        self._by_tokens = bool(plugin.calculate_per_token_loss)
        mesh = accelerator.state.device_mesh
        self._data = DataGroup(mesh, accelerator.num_processes)
        axes = () if mesh is None else mesh.mesh_dim_names or ()
        self._sequences: Any = mesh["cp"].get_group() if "cp" in axes else None
        self._stages: Any = mesh["pp"].get_group() if "pp" in axes else None
        if self._sequences is not None:
            self._require_splittable(plugin)
        self.total_loss_dict: dict[str, Any] = {}
        self.eval_total_loss_dict: dict[str, Any] = {}
        self._own_iteration = 0
        self._norm: Tensor | None = None
        self._told = False
        self.module_config: Any = None
        self._writer = _writer(self.args.tensorboard_dir, accelerator)

    def _handler(self, plugin: Any) -> AbstractTrainStep:
        if plugin.custom_train_step_class is not None:
            made: AbstractTrainStep = plugin.custom_train_step_class(
                self.args, **(plugin.custom_train_step_kwargs or {})
            )
            return made
        kind = getattr(self.args, "model_type_name", None)
        if kind not in _STEPS:
            raise InvalidArgument(
                f"MegatronEngine: a model of kind {kind!r}; expected one of {', '.join(_STEPS)}, or pass "
                "custom_train_step_class to MegatronLMPlugin"
            )
        return _STEPS[kind](self._accelerator, self.args)  # type: ignore[call-arg]

    def _require_splittable(self, plugin: Any) -> None:
        """Raises InvalidArgument if something computes with whole sequences while attention is over split ones."""
        step = self.train_step_handler
        own = isinstance(step, GPTTrainStep) and type(step).get_batch_func is GPTTrainStep.get_batch_func
        if not own or plugin.custom_get_batch_function is not None or self._custom_model:
            raise InvalidArgument(
                f"MegatronLMPlugin: context_parallel_size with {type(step).__name__}, or with a model or batches of "
                "the program's own; only the batches of GPTTrainStep are split. Leave context_parallel_size out"
            )
        if self.args.return_logits:
            raise InvalidArgument(
                "MegatronLMPlugin: return_logits=True with context_parallel_size, where each process has the logits of "
                "its tokens; leave one of them out"
            )

    @property
    def iteration(self) -> int:
        """The number of steps; checkpoints keep it where there is a schedule of Megatron-LM."""
        return self.scheduler.iteration if isinstance(self.scheduler, MegatronSchedule) else self._own_iteration

    def _count_step(self, samples: int) -> None:
        self._own_iteration = self.iteration + 1
        self.args.consumed_train_samples += samples
        if isinstance(self.scheduler, MegatronSchedule):
            self.scheduler.iteration = self._own_iteration
            self.scheduler.consumed_samples = self.args.consumed_train_samples

    # Modes

    def train(self, mode: bool = True) -> MegatronEngine:
        """Puts the model in training mode, and logs the losses of an evaluation that has ended."""
        super().train(mode)
        self.module_config = self.get_module_config()
        if mode:
            self.log_eval_results()
        return self

    def get_module_config(self) -> SimpleNamespace:
        """The options of the model, as attributes."""
        return self.args

    # Steps

    def get_batch_data_iterator(self, batch_data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """An iterator over the micro-batches of a batch, on the device of the process."""
        device = self._accelerator.device
        moved = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in batch_data.items()}
        return iter(chunks_of(moved, self._count))

    def forward(self, **batch_data: Any) -> Any:
        """A step, or in evaluation mode an evaluation, with a batch of this process.

        Returns:
            The loss of all processes, without dimensions and without a graph, on every process; for models with
            ``config.return_dict`` in an object of transformers, in evaluation with ``logits`` if
            ``return_logits`` of the plugin asks for them.
        """
        if self.training:
            found, skipped, norm, _ = self.train_step(**batch_data)
            self._count_step(self._samples(batch_data))
            self._log_training(found, skipped, norm)
        else:
            found = self.eval_step(**batch_data)
            self.args.consumed_valid_samples += self._samples(batch_data)
            self._note_evaluation(found)
        scalars = [value for value in found.values() if value.ndim == 0]
        loss = torch.stack(scalars).sum() if scalars else torch.zeros((), device=self._accelerator.device)
        kind = self.train_step_handler.model_output_class
        return loss if kind is None else kind(loss=loss, logits=found.get("logits"))

    def train_step(self, **batch_data: Any) -> tuple[dict[str, Tensor], int, Tensor | None, None]:
        """One step of the optimizer.

        Returns:
            The losses by name, over all processes; 1 if the step was skipped, because gradients were not finite, else
            0; the norm of the gradients before clipping, ``None`` without; and ``None``, in place of the number of
            gradients that are 0.

        Raises:
            InvalidArgument: no optimizer was prepared, or the batch has no rows.
        """
        if self.optimizer is None:
            raise InvalidArgument(
                "MegatronEngine: a step without an optimizer; pass the optimizer to prepare, together with the model"
            )
        if not torch.is_grad_enabled():
            raise InvalidArgument(
                "MegatronEngine: a call in training mode is a step, but gradients are off; call model.eval() before an "
                "evaluation, or leave torch.no_grad()"
            )
        self.optimizer.zero_grad()
        reported = self._passes(batch_data)
        norm: Tensor | None = None
        if self._clip > 0:
            norm = self._accelerator._clip_grad_norm(self.base_model.parameters(), self._clip)
        self._norm = norm
        self.optimizer.step()
        skipped = bool(self.optimizer.step_was_skipped)
        self.optimizer.skipped_iter = skipped
        if self.scheduler is not None and not skipped:
            self.scheduler.step()
        return reported, int(skipped), norm, None

    def require_stepped(self, loss: Tensor) -> None:
        """Raises InvalidArgument if ``loss`` is no loss of a step, but one of the program's own."""
        if loss.requires_grad:
            raise InvalidArgument(
                "backward: a loss with a graph in a run with megatron_lm_plugin, whose engine has taken the step in "
                "model(**batch), so that these gradients would reach no step; compute the loss in custom_loss_function "
                "or custom_train_step_class of the plugin"
            )

    def norm_of_step(self, max_norm: float) -> Tensor:
        """The norm of the gradients of the last step, which the engine has clipped; NaN if it does not clip."""
        if float(max_norm) != self._clip and not self._told:
            self._told = True
            warnings.warn(
                f"clip_grad_norm_ was called with max_norm={max_norm}, but the engine of Megatron-LM has stepped "
                f"already, with gradient_clipping={self._clip:g} of its plugin (0 is none), which counts; make them "
                "equal",
                stacklevel=3,
            )
        return torch.tensor(math.nan) if self._norm is None else self._norm

    @torch.no_grad()
    def eval_step(self, **batch_data: Any) -> dict[str, Tensor]:
        """The losses of a batch by name, over all processes; tensors with rows, as logits, of this process's batch."""
        return self._passes(batch_data)

    def _passes(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Forward passes of all micro-batches, and backward passes unless gradients are off; what they report."""
        pieces = list(self.get_batch_data_iterator(batch))
        rows = [rows_of(piece) for piece in pieces]
        passes = self._through_stages if self._strategy.trains_batches else self._one_by_one
        return self._over_processes(passes(pieces, rows), rows)

    def _one_by_one(self, pieces: list[dict[str, Any]], rows: list[int]) -> list[dict[str, Tensor]]:
        handler, run, trains = self.train_step_handler, self._accelerator, torch.is_grad_enabled()
        step = handler.forward_step
        call = None if self._custom_model else handler.call()
        shares: list[Any] = [number / sum(rows) for number in rows]
        model = ModelCall(self.base_model, call)

        def compute(piece: dict[str, Any]) -> tuple[Any, LossFunction]:
            return step(iter([piece]), model)

        computing = [partial(compute, piece) for piece in pieces]
        if trains and call is not None and knows_tokens(handler):
            # Batches are made once, as what makes them may draw random numbers.
            recorders = [Recorder(call) for _ in pieces]
            steps = [step(iter([piece]), recorder) for piece, recorder in zip(pieces, recorders, strict=True)]
            shares = self._shares([function for _, function in steps], rows)
            computing = [
                partial(recorder.computed, model, function)
                for recorder, (_, function) in zip(recorders, steps, strict=True)
            ]
        reports = []
        for number, outputs in enumerate(computing):
            last = number == len(pieces) - 1
            with nullcontext() if last or not trains else run.no_sync(self.base_model), self._split_attention():
                loss, reported = _computed(*outputs())
                if trains:
                    run._backward(loss * shares[number])
            reports.append(reported)
        return reports

    def _split_attention(self) -> Any:
        return nullcontext() if self._sequences is None else self._accelerator.maybe_context_parallel()

    def _through_stages(self, pieces: list[dict[str, Any]], rows: list[int]) -> list[dict[str, Tensor]]:
        call = self.train_step_handler.call()
        if call is None:
            raise InvalidArgument(
                f"MegatronEngine: {type(self.train_step_handler).__name__} does not say how it calls a model, which "
                "the first stage of a pipeline has to know; derive it from GPTTrainStep"
            )
        recorders, functions, inputs = [], [], []
        for piece in pieces:
            recorder = Recorder(call)
            returned, function = self.train_step_handler.forward_step(iter([piece]), recorder)
            inputs.append(recorder.inputs(returned))
            recorders.append(recorder)
            functions.append(function)
        shares = self._shares(functions, rows) if torch.is_grad_enabled() else [1.0] * len(rows)
        losses = _LossesOfStages(recorders, functions, shares, rows)
        whole = {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}
        numbers = torch.arange(sum(rows))
        passes = self._accelerator._train_stages if torch.is_grad_enabled() else self._strategy.eval_batch
        passes(self.base_model, whole, loss_fn=losses, targets=numbers)
        return self._from_last_stage(losses.reports, rows)

    def _shares(self, functions: list[LossFunction], rows: list[int]) -> list[Any]:
        counted = [tokens_counted(function) for function in functions]
        return shares_of(counted, rows, self._data, self._sequences, self._by_tokens)

    def _from_last_stage(self, reports: dict[int, dict[str, Any]], rows: list[int]) -> list[dict[str, Any]]:
        """What the last stage has reported, which other stages have not seen."""
        keeps_rows = not torch.is_grad_enabled()
        own = [
            {
                name: tree_map_only(Tensor, Tensor.cpu, value)
                for name, value in reports[number].items()
                if keeps_rows or isinstance(value, tuple) or value.ndim == 0
            }
            for number in sorted(reports)
        ]
        said: list[Any] = [own if len(own) == len(rows) else None]
        last = dist.get_world_size(self._stages) - 1
        dist.broadcast_object_list(said, dist.get_global_rank(self._stages, last), group=self._stages)
        device = self._accelerator.device
        found: list[dict[str, Any]] = tree_map_only(Tensor, lambda value: value.to(device), said[0])
        return found

    def _over_processes(self, reports: list[dict[str, Any]], rows: list[int]) -> dict[str, Tensor]:
        """Of the micro-batches of all processes: means of losses, pairs as quotients of sums, rows put together."""
        found: dict[str, Tensor] = {}
        weights = [number / sum(rows) for number in rows]
        pairs: dict[str, Tensor] = {}
        for name, first in reports[0].items():
            values = [report[name] for report in reports]
            if isinstance(first, tuple):
                stacked = torch.stack([torch.stack([one.float() for one in value]) for value in values])
                pairs[name] = self._joint_pair(stacked, weights)
            elif first.ndim == 0:
                mean = torch.stack([value.float() * weight for value, weight in zip(values, weights, strict=True)])
                pairs[name] = torch.stack([mean.sum(), torch.ones_like(mean[0])])
            else:
                found[name] = torch.cat(values)
        if pairs:
            sums = self._data.summed(torch.stack(list(pairs.values())).to(self._accelerator.device))
            found = {name: one[0] / one[1].clamp(min=1) for name, one in zip(pairs, sums, strict=True)} | found
        return found

    def _joint_pair(self, pairs: Tensor, weights: list[float]) -> Tensor:
        """One pair for those of all micro-batches here, (micro-batches, 2), whose tokens or which count equally."""
        if self._by_tokens:
            return pairs.sum(0)
        if self._sequences is not None:
            dist.all_reduce(pairs, group=self._sequences)
        means = pairs[:, 0] / pairs[:, 1].clamp(min=1)
        return torch.stack([(means * torch.tensor(weights, device=means.device)).sum(), torch.ones_like(means[0])])

    def _samples(self, batch: Mapping[str, Any]) -> int:
        return rows_of(batch) * int(self._accelerator._session.topology.mesh.data_size)

    # Logs

    def _log_training(self, found: Mapping[str, Tensor], skipped: int, norm: Tensor | None) -> None:
        if self._writer is None:
            return
        values = {name: value for name, value in found.items() if value.ndim == 0}
        values["learning-rate"] = self.optimizer.param_groups[0]["lr"]
        values["skipped"] = torch.tensor(float(skipped))
        if norm is not None:
            values["grad-norm"] = norm
        if self._accelerator.scaler is not None:
            values["loss-scale"] = self._accelerator.scaler.get_scale()
        for name, value in values.items():
            self._writer.add_scalar(name, float(value), self.iteration)

    def _note_evaluation(self, found: Mapping[str, Tensor]) -> None:
        if self.args.tensorboard_dir is None:
            return
        for name, value in found.items():
            if value.ndim == 0:
                total, count = self.eval_total_loss_dict.get(name, (0.0, 0))
                self.eval_total_loss_dict[name] = (total + float(value), count + 1)

    def log_eval_results(self) -> None:
        """Prints and logs the mean losses of the evaluation since the last call, where there is a tensorboard_dir."""
        if self.args.tensorboard_dir is None or self.iteration == 0 or not self.eval_total_loss_dict:
            return
        texts = [f"validation loss at iteration {self.iteration}"]
        for name, (total, count) in self.eval_total_loss_dict.items():
            value = total / count
            perplexity = math.exp(min(20.0, value))
            texts.append(f"{name} value: {value:.6E}" + (f" | {name} PPL: {perplexity:.6E}" * self._pretrains))
            if self._writer is not None:
                self._writer.add_scalar(f"{name} validation", value, self.iteration)
                if self._pretrains:
                    self._writer.add_scalar(f"{name} validation ppl", perplexity, self.iteration)
        if self._accelerator.is_last_process:
            print(" | ".join(texts), flush=True)
        self.eval_total_loss_dict = {}

    @property
    def _pretrains(self) -> bool:
        return bool(self.args.pretraining_flag)

    # Checkpoints

    def save_checkpoint(self, output_dir: str | os.PathLike[str]) -> None:
        """Saves the state of the run into ``output_dir``, as ``Accelerator.save_state`` does."""
        self.log_eval_results()
        self._accelerator.save_state(output_dir)

    def load_checkpoint(self, input_dir: str | os.PathLike[str]) -> None:
        """Loads what :meth:`save_checkpoint` wrote, also on another mesh."""
        self._accelerator.load_state(input_dir)
        if isinstance(self.scheduler, MegatronSchedule):
            self.args.consumed_train_samples = self.scheduler.consumed_samples


def without_engine(model: torch.nn.Module) -> torch.nn.Module:
    """The prepared model of an engine; another model as it is."""
    return model.base_model if isinstance(model, MegatronEngine) else model


def _computed(outputs: Any, function: Callable[[Any], Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch, and what is reported of it.

    Raises:
        InvalidArgument: ``function`` returned something else.
    """
    found = function(outputs)
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
        raise InvalidArgument(
            f"MegatronEngine: a loss function returned {type(found).__name__}; expected the mean of the micro-batch's "
            "loss and a dict of losses to report"
        )
    loss, reported = found
    return loss, tree_map_only(Tensor, lambda value: value.detach(), dict(reported))


class _LossesOfStages:
    """The share of a micro-batch in the loss of the step, which the last stage computes from its outputs.

    Args:
        recorders: for each micro-batch how the model was called.
        functions: its loss functions.
        shares: what its loss is multiplied with.
        rows: how many it has.
    """

    reduction = "sum"
    """The shares are added up as they are."""

    def __init__(
        self, recorders: list[Recorder], functions: list[LossFunction], shares: list[Any], rows: list[int]
    ) -> None:
        self._recorders, self._functions, self._shares = recorders, functions, shares
        begins = torch.tensor([0, *rows[:-1]]).cumsum(0).tolist()
        self._numbers = {begin: number for number, begin in enumerate(begins)}
        self.reports: dict[int, dict[str, Tensor]] = {}

    def __call__(self, outputs: Any, rows: Tensor) -> Tensor:
        number = self._numbers[int(rows[0])]
        loss, self.reports[number] = _computed(self._recorders[number].outputs(outputs), self._functions[number])
        share: Tensor = loss * self._shares[number]
        return share


def _writer(folder: str | None, accelerator: Any) -> Any:
    """What logs for TensorBoard, on the last process."""
    if folder is None or not accelerator.is_last_process:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"MegatronLMPlugin: tensorboard_dir={folder!r} needs TensorBoard, which is not installed; install "
            "tensorboard, or leave tensorboard_dir out"
        ) from error
    return SummaryWriter(folder)
