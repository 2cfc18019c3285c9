"""A model in stages on several ranks, which is trained a batch at a time."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.blocks import Absent
from accelerate_cpp.parallel.pipeline.cut import Cut, cut_model
from accelerate_cpp.parallel.pipeline.evaluation import KnownShapes, evaluate, form_of
from accelerate_cpp.parallel.pipeline.losses import LossFunction, PartsOfLoss, Shares
from accelerate_cpp.parallel.pipeline.micro_batches import MicroBatches
from accelerate_cpp.parallel.pipeline.outputs import Outputs, given_to_all
from accelerate_cpp.parallel.pipeline.peers import global_rank
from accelerate_cpp.parallel.pipeline.schedules import Schedule, schedule_named
from accelerate_cpp.parallel.pipeline.shapes import Passed, like
from accelerate_cpp.parallel.pipeline.tied_weights import TiedWeights
from accelerate_cpp.parallel.pipeline.without_tensors import can_be_saved, without_tensors
from accelerate_cpp.plugins.parallelism import PipelineParallelConfig

__all__ = ["Evaluation", "Pipeline"]

_KEPT = 4
"""For how many shapes of batches schedules are kept; each has room for all that it receives in a step."""


class Evaluation(NamedTuple):
    """What :meth:`Pipeline.eval_batch` found.

    Attributes:
        loss: of the whole batch, without dimensions, on all ranks; ``None`` if there is none.
        outputs: with the rows of the batch, on the rank with the last stage, or on all ranks if they are gathered.
    """

    loss: Tensor | None
    outputs: Any


class Pipeline(nn.Module):
    """The stages of a model that this rank has, and the training of the model with all ranks of a group.

    Names of parameters, buffers and entries of the state are those in the whole model; over all ranks they are the
    whole state. Weights that stages share are on each rank that needs them, with the same values and gradients. Stages
    can be changed in place (split, sharded, checkpointed, compiled) before the first batch, and after that if
    :meth:`rebuild` is called.

    A model of Transformers keeps the attributes that are no tensors, modules or methods: ``config``,
    ``generation_config``, ``name_or_path`` and others are those of the whole model.

    Args:
        cut: all stages; only those of this rank are kept.
        whole: the model as it was given, for a group of one rank.
        schedule: the order of computation.
        micro_batches: into how many parts a batch is divided.
        group: the ranks of the pipeline, each with the next stages; all ranks call the same methods in the same order.
            By default all processes.

    Attributes:
        stages: the modules of this rank, in the order of the model.
        stage_numbers: their numbers among all stages.
        begins: for all stages, the name of the module with which they begin.
    """

    def __init__(
        self, cut: Cut, whole: nn.Module, schedule: Schedule, micro_batches: int, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__()
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self._group, self._schedule, self._rank = group, schedule, rank
        self._ranks = schedule.ranks_of_stages(ranks) if ranks > 1 else [0]
        self.micro_batches = micro_batches
        self.begins = cut.begins
        self.stage_numbers = [number for number, owner in enumerate(self._ranks) if owner == rank]
        self.stages = nn.ModuleList(cut.stages[number] for number in self.stage_numbers)
        self.training = whole.training
        self._batches = cut.batches
        self._names = frozenset(whole.state_dict())
        self._ties = cut.ties
        self.__dict__["_whole"] = whole if ranks == 1 else None
        self.__dict__["_described"] = None
        if can_be_saved(whole):
            self.__dict__["_described"] = whole if ranks == 1 else without_tensors(whole)
        double = any(parameter.dtype == torch.float64 for parameter in whole.parameters())
        self._loss_dtype = torch.float64 if double else torch.float32
        self._built: OrderedDict[Any, _Running] = OrderedDict()
        self._shapes: KnownShapes | None = None
        self._tied: TiedWeights | None = None

    @classmethod
    def of(cls, model: nn.Module, group: dist.ProcessGroup | None, options: PipelineParallelConfig) -> Pipeline:
        """The pipeline of ``model``, which is the same on all ranks of ``group`` and is not changed.

        Raises:
            InvalidArgument: the schedule does not exist or cannot compute that many micro-batches, or the model cannot
                be cut into that many stages.
        """
        ranks = dist.get_world_size(group)
        schedule = schedule_named(str(options.schedule), options.stages_per_process)
        micro_batches = 2 * ranks if options.micro_batches is None else options.micro_batches
        schedule.check(ranks, micro_batches)
        count = ranks * schedule.stages_per_rank if ranks > 1 else 1
        cut = cut_model(model, count, options.split_points if ranks > 1 else None)
        return cls(cut, model, schedule, micro_batches, group)

    @property
    def stage_modules(self) -> list[nn.Module]:
        """The modules of the stages of this rank, in the order of the model."""
        return list(self.stages)

    @property
    def has_first_stage(self) -> bool:
        return 0 in self.stage_numbers

    @property
    def has_last_stage(self) -> bool:
        return len(self._ranks) - 1 in self.stage_numbers

    @property
    def names_elsewhere(self) -> frozenset[str]:
        """The names of entries of the whole model's state that this rank has not."""
        return self._names - frozenset(self.state_dict(keep_vars=True))

    @property
    def names_of_copies(self) -> dict[str, str]:
        """The names of parameters that several stages have, with that of the first stage."""
        return {name: tie.names[min(tie.names)] for tie in self._ties for name in tie.names.values()}

    @property
    def copies(self) -> frozenset[str]:
        """The names of parameters here that an earlier rank has, too; sums over the model count them there only."""
        return self._tied_weights().copies

    def rebuild(self) -> None:
        """Forgets what was found out about the stages, after they were changed."""
        self._built.clear()
        self._shapes = None
        self._tied = None

    def train_batch(
        self,
        inputs: Any,
        loss_fn: LossFunction | None = None,
        targets: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        loss_scale: float | Tensor = 1.0,
        counted: Shares | None = None,
    ) -> Tensor:
        """Adds the gradients of the loss of a batch to those of the parameters, as ``loss.backward()`` does.

        Losses and gradients are those of the whole batch at once, if what stages compute for a row does not depend on
        other rows (batch norms see the rows of one part). Every rank of the group calls this with the same batch. Run
        it under ``torch.autocast`` for mixed precision.

        Args:
            inputs: what the model takes, with one row for each sample: a tensor or a tuple of tensors; for a decoder
                ``input_ids``, integers of shape (rows, tokens), or a mapping with ``input_ids`` and perhaps ``labels``,
                ``attention_mask`` and ``position_ids``. Rows need not be a multiple of ``micro_batches``.
            loss_fn: called with outputs and targets of a part of the batch (outputs alone if there are no targets);
                returns their mean, or their sum if it has ``reduction == "sum"``. By default, a decoder's own loss: the
                cross entropy of each next token over labels other than -100. Outputs of a decoder are its logits.
            targets: tensors with the rows of the batch, or structures of them. For a mapping they are its ``labels``,
                and the mapping itself if it has none.
            kwargs: tensors with the rows of the batch, or with one row for all; every stage gets its part.
            loss_scale: what gradients are multiplied with.
            counted: for a part of the targets, how many elements ``loss_fn`` returns the mean of. By default labels
                that count for a cross entropy or for labels of a decoder, else rows.

        Returns:
            The loss of the batch on all ranks, without dimensions, detached and not scaled; float32, or float64 if the
            model has parameters of that.

        Raises:
            InvalidArgument: the batch has another form, or ``loss_fn`` does not return one element.
        """
        batch = self._batches.read(inputs, targets, kwargs)
        device = self._device()
        parts = MicroBatches(batch, self.micro_batches, device)
        has_targets = batch.targets is not None
        last = PartsOfLoss(self._batches, parts, has_targets, loss_fn, counted, loss_scale)
        if len(self._ranks) == 1:
            for number in range(parts.count):
                args, named = parts.part(number)
                last(self.stages[0](*args, **named), number).backward()
            return last.total().to(self._loss_dtype)
        running = self._running(parts, device)
        tied = self._tied_weights()
        tied.begin()
        try:
            running.step(parts, last)
        except BaseException:
            self._built.clear()  # what it holds of this step is of no use to another
            tied.abandon()
            raise
        tied.end()
        return self._from_last(last.total() if self.has_last_stage else None, device)

    @torch.no_grad()
    def eval_batch(
        self,
        inputs: Any,
        loss_fn: LossFunction | None = None,
        targets: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        counted: Shares | None = None,
        gather_outputs: bool = False,
    ) -> Evaluation:
        """The loss and the outputs for a batch, without gradients; arguments as those of :meth:`train_batch`.

        There is a loss if there is a ``loss_fn``, or if a decoder gets labels. Every rank of the group calls this.

        Args:
            gather_outputs: give the outputs to all ranks.
        """
        batch = self._batches.read(inputs, targets, kwargs)
        device = self._device()
        parts = MicroBatches(batch, self.micro_batches, device)
        measures = loss_fn is not None or (batch.targets is not None and isinstance(batch.targets, Tensor))
        kept = Outputs()
        last = PartsOfLoss(
            self._batches, parts, batch.targets is not None, loss_fn, counted, outputs=kept, measures=measures
        )
        if len(self._ranks) == 1:
            for number in range(parts.count):
                args, named = parts.part(number)
                last(self.stages[0](*args, **named), number)
            return Evaluation(last.total().to(self._loss_dtype) if measures else None, kept.joined())
        passed = self._passed_for(parts, device)
        evaluate(self._own_stages(), self._ranks, passed, self._group, device, parts, last)
        outputs = kept.joined() if self.has_last_stage else None
        if gather_outputs:
            outputs = given_to_all(outputs, self._ranks[-1], self._group, device)
        loss = self._from_last(last.total() if self.has_last_stage else None, device) if measures else None
        return Evaluation(loss, outputs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model itself, in a group of one rank.

        Raises:
            InvalidArgument: there are several ranks.
        """
        whole = self.__dict__["_whole"]
        if whole is None:
            raise InvalidArgument(
                "pipeline: a model in stages has no forward pass of its own; call train_batch(inputs, loss_fn, "
                "targets), which also computes gradients, or eval_batch"
            )
        return whole(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This module and those of its stages, under their names in the whole model."""
        memo = set() if memo is None else memo
        if remove_duplicate and self in memo:
            return
        memo.add(self)
        yield prefix, self
        for stage in self.stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """The module of that name in the whole model, if this rank has it; of a container, the part in a stage."""
        if target == "":
            return self
        for stage in self.stages:
            try:
                found = stage.get_submodule(target)
            except AttributeError:
                continue
            if not isinstance(found, Absent):
                return found
        raise AttributeError(f"no stage of this rank has a module {target!r}")

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The entries of the whole model's state that this rank has."""
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()
        for stage in self.stages:
            stage.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the entries of this rank from its own state or from that of the whole model.

        Raises:
            RuntimeError: ``strict``, and entries of this rank are missing, or there are some that the model has not.
        """
        own = self.state_dict(keep_vars=True)
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in own and name not in self._names]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"the state does not fit the stages {self.stage_numbers}: missing {missing}, unexpected {unexpected}"
            )
        for stage in self.stages:
            names = set(stage.state_dict(keep_vars=True))
            chosen = {name: value for name, value in state_dict.items() if name in names}
            stage.load_state_dict(chosen, strict=False, assign=assign)
        return _IncompatibleKeys(missing, unexpected)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes the files from which ``from_pretrained`` loads the whole model; of a model of Transformers.

        Args:
            is_main_process: whether this rank writes; others do nothing.
            state_dict: of the whole model, ``accelerator.get_state_dict(model)``, for which all ranks are needed.
            kwargs: those of the model's own method.

        Raises:
            InvalidArgument: the model has no such method, or this rank writes and there is no state of the whole model.
        """
        described: Any = self.__dict__["_described"]
        if described is None:
            raise InvalidArgument(
                "pipeline: save_pretrained is a method of models of Transformers, of which this is none; save "
                "accelerator.get_state_dict(model), or call accelerator.save_model(model, folder)"
            )
        if not is_main_process:
            return
        if state_dict is None and self.__dict__["_whole"] is None:
            raise InvalidArgument(
                f"pipeline: save_pretrained without state_dict, but this rank only has the stages {self.stage_numbers} "
                f"of {len(self._ranks)}; pass state_dict=accelerator.get_state_dict(model), which all ranks call, and "
                "is_main_process=accelerator.is_main_process"
            )
        names: dict[int, list[str]] = {}  # of what is one tensor, one is enough
        for name, tensor in described.state_dict(keep_vars=True).items():
            names.setdefault(id(tensor), []).append(name)
        missing = [one[0] for one in names.values() if state_dict is not None and state_dict.keys().isdisjoint(one)]
        if missing:
            raise InvalidArgument(
                f"pipeline: save_pretrained with a state_dict that lacks {len(missing)} of the {len(names)} tensors of "
                f"the model, such as {missing[0]!r}; pass accelerator.get_state_dict(model), which rank 0 gets, and "
                "is_main_process=accelerator.is_main_process"
            )
        given = None if state_dict is None else dict(state_dict)  # Transformers takes out what it has written
        described.save_pretrained(save_directory, is_main_process=True, state_dict=given, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            described = self.__dict__.get("_described")
            value = getattr(described, name, None)
            if described is None or name == "device" or callable(value) or isinstance(value, Tensor):
                raise
            if value is None and not hasattr(described, name):
                raise
            return value

    def _tied_weights(self) -> TiedWeights:
        if self._tied is None:
            self._tied = TiedWeights(self._ties, self._ranks, self._own_stages(), self._group)
        return self._tied

    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self.stages.parameters()), torch.device("cpu"))

    def _own_stages(self) -> dict[int, nn.Module]:
        return dict(zip(self.stage_numbers, self.stages, strict=True))

    def _running(self, parts: MicroBatches, device: torch.device) -> _Running:
        """The schedule for batches of this shape."""
        key = form_of(parts, device)
        if key in self._built:
            self._built.move_to_end(key)
            return self._built[key]
        passed = self._passed_for(parts, device)
        running = self._built[key] = _Running(self, [parts.inputs, *passed], device)
        if len(self._built) > _KEPT:
            self._built.popitem(last=False)
        return running

    def _passed_for(self, parts: MicroBatches, device: torch.device) -> list[Passed]:
        """What stages return for parts of this shape. The first time, copies of weights get the same values."""
        if self._shapes is None:
            self._tied_weights().equalise()
            self._shapes = KnownShapes(self._own_stages(), self._ranks, self._group, self._batches.shapes_follow_inputs)
        return self._shapes.of(parts, device)

    def _from_last(self, loss: Tensor | None, device: torch.device) -> Tensor:
        value = torch.zeros((), dtype=self._loss_dtype, device=device) if loss is None else loss.to(self._loss_dtype)
        dist.broadcast(value, global_rank(self._ranks[-1], self._group), self._group)
        return value


class _Running:
    """Torch's schedule for batches of one shape.

    Args:
        passed: what each stage gets, and at the end what the last one returns.
    """

    def __init__(self, pipeline: Pipeline, passed: list[Passed], device: torch.device) -> None:
        from torch.distributed.pipelining import PipelineStage

        count = len(passed) - 1
        stages = [
            PipelineStage(
                module,
                number,
                count,
                device,
                input_args=like(passed[number], with_gradients=number > 0),
                output_args=like(passed[number + 1]),
                group=pipeline._group,
            )
            for number, module in zip(pipeline.stage_numbers, pipeline.stages, strict=True)
        ]
        self._has_first, self._has_last = pipeline.has_first_stage, pipeline.has_last_stage
        self._last: PartsOfLoss | None = None
        self._numbers_of_parts = torch.arange(pipeline.micro_batches)
        self._schedule = pipeline._schedule.build(stages, pipeline.micro_batches, self._loss_of_part)

    def step(self, parts: MicroBatches, last: PartsOfLoss) -> None:
        self._last = last
        args = parts.args if self._has_first else ()
        # Torch divides targets as it does inputs. Each part gets its number, by which it finds its targets.
        target = self._numbers_of_parts if self._has_last else None
        try:
            self._schedule.step(*args, target=target, return_outputs=False, **parts.kwargs)
        finally:
            self._last = None

    def _loss_of_part(self, outputs: Any, number: Tensor) -> Tensor:
        assert self._last is not None
        return self._last(outputs, int(number))
