"""Checks backward passes and optimizer steps: whether trained objects were prepared and have gradients."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from accelerate_cpp.check.observed import CheckFinished, Observed
from accelerate_cpp.check.source import here
from accelerate_cpp.devices.shards import is_sharded_tensor

_NAMES_SHOWN = 4


class Training:
    """Watches backward passes, optimizer steps and the gradients between them."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._nested: list[Any] = []
        self._to_be_cleared: dict[int, Any] = {}  # optimizers that have stepped
        self._not_cleared: set[int] = set()  # of them, those that had gradients when the next backward pass began
        self._received: set[int] = set()
        self._forwards: dict[int, int] = {}
        self._watched: list[Any] = []
        self._backwards_since_step = 0
        self._first_step = ""

    def watch_models(self, models: Iterable[Any]) -> None:
        """Notes from now on which parameters of prepared models get gradients, and whether the models are called."""
        for model in models:
            if any(model is known for known in self._watched):
                continue
            self._watched.append(model)
            self._forwards[id(model)] = 0
            model.register_forward_pre_hook(self._note_forward)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(partial(self._note_gradient, id(parameter)))

    def _note_gradient(self, parameter: int, _: Any) -> None:
        self._received.add(parameter)

    def _note_forward(self, model: Any, _: Any) -> None:
        self._forwards[id(model)] += 1

    def backward(self, loss: Any, is_plain: bool = False) -> None:
        """A backward pass begins, of ``Accelerator.backward`` or a plain one."""
        observed = self._observed
        for key, optimizer in self._to_be_cleared.items():
            if any(parameter.grad.count_nonzero() for parameter in _with_gradients(optimizer)):
                self._not_cleared.add(key)
        self._to_be_cleared.clear()
        observed.backwards += 1
        self._backwards_since_step += 1
        if isinstance(loss, torch.Tensor) and not bool(torch.isfinite(loss.detach()).all()):
            observed.find(
                "warning",
                "loss-not-finite",
                f"the loss of backward pass {observed.backwards} is {loss.detach().flatten()[0].item()}",
                "look for it with torch.autograd.detect_anomaly()",
            )
        if is_plain and observed.accelerators:
            self._judge_plain_backward()

    def _judge_plain_backward(self) -> None:
        observed, leaves_out = self._observed, []
        if observed.accumulation_steps > 1:
            leaves_out.append(f"the loss is not divided by gradient_accumulation_steps={observed.accumulation_steps}")
        if observed.scales_loss:
            leaves_out.append("the loss is not scaled, as fp16 needs")
        what = "loss.backward() is called directly" + (": " + ", and ".join(leaves_out) if leaves_out else "")
        observed.find("error" if leaves_out else "note", "plain-backward", what, "call accelerator.backward(loss)")

    def before_step(self, optimizer: Any, has_closure: bool = False) -> None:
        """The ``step`` of a torch optimizer begins; with a closure, gradients come only in it."""
        self._nested.append(optimizer)
        if len(self._nested) > 1:  # one that another steps
            return
        observed = self._observed
        reads = observed.reading or any(one.trains for one in observed.passes)
        if not reads and observed.steps_of.get(id(optimizer), 0) >= observed.task.steps:
            self._nested.clear()
            raise CheckFinished(f"step {observed.task.steps + 1} of an optimizer begins")
        self._first_step = self._first_step or here()
        if id(optimizer) in self._not_cleared:
            observed.find(
                "error",
                "gradients-not-cleared",
                "gradients of the step before were still there, and the new ones were added to them",
                "call optimizer.zero_grad() once for each step",
            )
        if observed.steps_in_backward:
            return
        if observed.accelerators and not has_closure:
            self._judge_parameters(optimizer)
        if observed.accelerators and not observed.is_prepared_optimizer(optimizer):
            self._judge_unprepared(optimizer)

    def _judge_parameters(self, optimizer: Any) -> None:
        observed, models = self._observed, self._observed.prepared("models")
        known = {id(parameter) for model in models for parameter in model.parameters()}
        stepped = _with_gradients(optimizer)
        elsewhere = [p for m in models for p in m.parameters() if p.grad is not None and p.grad.count_nonzero()]
        name = type(optimizer).__name__
        if not stepped:
            what = f"{name} steps, and none of its parameters has a gradient"
            if elsewhere:
                what += "; the prepared model has other parameters, which do: those of the optimizer were replaced"
            advice = "make the optimizer from the parameters of the model that is trained, before prepare"
            observed.find("error", "optimizer-without-gradients", what, advice)
        elif observed.is_distributed and not any(id(parameter) in known for parameter in stepped):
            observed.find(
                "error",
                "unprepared-model",
                f"{name} steps parameters of a model that has not been prepared: "
                "its gradients are not averaged, and each process trains a model of its own",
                "pass the model to prepare, and call what that returns",
            )

    def _judge_unprepared(self, optimizer: Any) -> None:
        observed, consequences = self._observed, []
        if observed.accumulation_steps > 1:
            consequences.append(
                f"it steps in every micro-batch, not once in gradient_accumulation_steps={observed.accumulation_steps}"
            )
        if observed.scales_loss:
            consequences.append("it steps on gradients of a scaled loss")
        level = "error" if consequences else "warning"
        what = "; ".join([f"{type(optimizer).__name__} has not been prepared: save_state leaves it out", *consequences])
        observed.find(level, "unprepared-optimizer", what, "pass it to prepare, and step what that returns")

    def after_step(self, optimizer: Any) -> None:
        """The ``step`` of a torch optimizer ended."""
        self._nested.pop()
        if self._nested:
            return
        observed = self._observed
        count = observed.steps_of[id(optimizer)] = observed.steps_of.get(id(optimizer), 0) + 1
        self._to_be_cleared[id(optimizer)] = optimizer
        self._not_cleared.discard(id(optimizer))
        self._backwards_since_step = 0
        if observed.is_distributed and not observed.averages_weights and count <= observed.task.steps:
            self._write_down_weights()

    def _write_down_weights(self) -> None:
        if self._observed.has_stages:
            return  # ranks have other weights
        for number, model in enumerate(self._watched):
            trained = {
                name: parameter
                for name, parameter in model.named_parameters()
                if id(parameter) in self._received and not is_sharded_tensor(parameter)
            }
            checksums = {name: _checksum(parameter) for name, parameter in trained.items()}
            self._observed.journal.write(
                "weights", model=number, steps=self._observed.steps, checksums=checksums, where=here()
            )

    def zero_grad(self, optimizer: Any) -> None:
        """Gradients of an optimizer are cleared."""
        observed = self._observed
        self._to_be_cleared.pop(id(optimizer), None)
        self._not_cleared.discard(id(optimizer))
        loses = observed.is_prepared_optimizer(optimizer) and observed.accumulates and observed.accumulation_steps > 1
        if loses and self._backwards_since_step > 0 and any(True for _ in _with_gradients(optimizer)):
            observed.find(
                "error",
                "accumulated-gradients-lost",
                f"zero_grad clears the gradients of "
                f"{self._backwards_since_step} micro-batches before the step that they were accumulated for",
                "call zero_grad after optimizer.step(), not before backward",
            )

    def zero_grad_of_model(self) -> None:
        """Gradients of a model are cleared, of which its optimizers do not know."""
        self._to_be_cleared.clear()
        self._not_cleared.clear()

    def conclude(self) -> None:
        """The findings about all steps."""
        observed = self._observed
        if observed.backwards and not observed.steps:
            observed.find(
                "warning",
                "never-steps",
                f"{observed.backwards} backward passes, and no optimizer stepped",
                "call step of the prepared optimizer after backward",
                "",
            )
        if not observed.steps or not observed.accelerators:
            return
        if observed.accumulation_steps > 1 and not observed.accumulates and observed.steps >= observed.backwards > 0:
            observed.find(
                "warning",
                "accumulate-unused",
                f"gradient_accumulation_steps={observed.accumulation_steps} divides "
                "each loss, and the optimizer steps in every batch all the same: steps are too short",
                "do each micro-batch within `with accelerator.accumulate(model):`",
                self._first_step,
            )
        for model in self._watched:
            self._judge_model(model)

    def _judge_model(self, model: Any) -> None:
        observed = self._observed
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        without = [name.removeprefix("module.") for name, p in trained if id(p) not in self._received]
        kind = type(getattr(model, "module", model)).__name__
        is_called = self._forwards[id(model)] or observed.has_stages
        if observed.is_distributed and len(without) < len(trained) and not is_called:
            observed.find(
                "error",
                "prepared-model-unused",
                f"{kind} is trained, but not through what prepare returned for it: "
                "nothing makes sure that its gradients are averaged",
                "call the model that prepare returned, not the one that was given to it, nor its .module",
                self._first_step,
            )
        if 0 < len(without) < len(trained):
            shown = ", ".join(without[:_NAMES_SHOWN]) + (", …" if len(without) > _NAMES_SHOWN else "")
            observed.find(
                "warning",
                "parameters-without-gradients",
                f"{len(without)} of {len(trained)} parameters of {kind} got no gradient: {shown}",
                "use them in the loss, or set requires_grad=False; torch's "
                "DistributedDataParallel would need find_unused_parameters",
                self._first_step,
            )


def _with_gradients(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
