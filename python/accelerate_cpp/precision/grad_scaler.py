"""The loss scaler of fp16 training on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.amp.grad_scaler import OptState

from accelerate_cpp._native import LossScale, have_gradients, known_statistics, measure_gradients, scale_gradients
from accelerate_cpp.devices.shards import local_part
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.precision.device_grad_scaler import DeviceGradScaler

_STATE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@dataclass
class _OptimizerState:
    """The state of the gradients of one optimizer in the current round."""

    unscaled: bool = False
    overflow: bool | None = None  # None: not looked at
    stepped: bool = False


@dataclass
class _Round:
    """From the first backward pass after an update until the next such pass. Its gradients have one scale."""

    scale: float
    growth_tracker: int
    checked: bool = False
    overflow: bool = False
    updated: bool = False
    optimizers: WeakKeyDictionary[torch.optim.Optimizer, _OptimizerState] = field(default_factory=WeakKeyDictionary)

    def of(self, optimizer: torch.optim.Optimizer) -> _OptimizerState:
        return self.optimizers.setdefault(optimizer, _OptimizerState())

    def note(self, state: _OptimizerState, overflow: bool) -> None:
        """Records whether gradients of an optimizer were not finite."""
        state.overflow = overflow
        self.checked, self.overflow = True, self.overflow or state.overflow


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradients(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    """The gradients of an optimizer, by the identity of their parameters."""
    gradients: dict[int, torch.Tensor] = {}
    for parameter in _parameters(optimizer):
        if parameter.grad is None:
            continue
        if parameter.grad.dtype == torch.float16:
            raise InvalidArgument(
                "a parameter is stored in fp16, and so is its gradient, which would underflow when un-scaled; keep the "
                "parameters in fp32 (model.float()): mixed precision still computes in fp16"
            )
        gradients[id(parameter)] = local_part(parameter.grad)
    return gradients


def _measured_gradients(
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[int, torch.Tensor], dict[int, tuple[float, int]]]:
    """The gradients of an optimizer, and what is known of them, by the identity of their parameters.

    For gradients that the reduction has measured, the sum of the squares and the number of non-finite elements are
    known until somebody looks at the gradient.
    """
    parameters = _parameters(optimizer)
    known = {
        id(parameter): statistics
        for parameter, statistics in zip(parameters, known_statistics(parameters), strict=True)
        if statistics is not None
    }
    return _gradients(optimizer), known


class GradScaler(torch.amp.GradScaler):
    """Scales the loss so that small fp16 gradients do not vanish, and leaves out steps whose gradients overflowed.

    Used as ``torch.amp.GradScaler``, whose arguments, state dict and rules it has. Three things are better: gradients
    are un-scaled, checked and measured in one pass over their memory; several optimizers that step one after another on
    the gradients of one backward pass use the scale of that pass, and count as one step; fused optimizers un-scale
    inside their own pass.

    Args:
        device: ``"cpu"``.
        init_scale: positive and finite.
        growth_factor: above 1; multiplies the scale after ``growth_interval`` steps without an overflow.
        backoff_factor: between 0 and 1; multiplies the scale after a step with an overflow.
        growth_interval: at least 1.
        enabled: if false, losses and gradients are left as they are.
        any_rank: whether something holds on one of the ranks, a collective; where each has a part of the gradients, an
            overflow in one part is one of all. ``None`` where each has the whole.

    Raises:
        InvalidArgument: an argument is out of its range.
    """

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        any_rank: Callable[[bool], bool] | None = None,
    ) -> None:
        super().__init__(device, enabled=False)  # of the parent class only the type is used
        if device != "cpu":
            raise InvalidArgument(f"device={device!r}: this scaler is for the CPU; use torch.amp.GradScaler elsewhere")
        self._enabled = enabled
        self._any_rank = any_rank
        self._loss_scale = LossScale(init_scale, growth_factor, backoff_factor, growth_interval)
        self._round = self._next_round()

    def scale(self, outputs: Any) -> Any:
        """``outputs``, a tensor or an iterable of tensors (nested, too), multiplied by the scale."""
        if not self._enabled:
            return outputs
        if self._round.updated:
            self._round = self._next_round()
        return self._scaled(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of ``optimizer`` by the scale, in place, and checks them.

        Raises:
            RuntimeError: they have been divided already, or ``optimizer`` has stepped on them.
        """
        self.unscale_but(optimizer, frozenset())

    def unscale_but(self, optimizer: torch.optim.Optimizer, left: frozenset[int]) -> dict[int, tuple[float, float]]:
        """As :meth:`unscale_`, but the caller multiplies some gradients that need no measuring.

        Args:
            left: ``id`` s of parameters whose gradients the caller can multiply.

        Returns:
            By ``id`` of the parameters, the sums of the squares of their gradients as they are now, and the factors by
            which the caller has still to multiply these gradients.
        """
        if not self._enabled:
            return {}
        state = self._round.of(optimizer)
        if state.stepped:
            raise RuntimeError("unscale_() is being called after step().")
        if state.unscaled:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        gradients, known = _measured_gradients(optimizer)
        inverse = 1.0 / self._round.scale
        now = [key for key in gradients if key not in known or key not in left]
        statistics = dict(zip(now, scale_gradients([gradients[key] for key in now], inverse), strict=True))
        state.unscaled = True
        self._note(state, {**known, **statistics}.values())
        return {key: (statistics[key][0], 1.0) if key in statistics else (known[key][0], inverse) for key in gradients}

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the gradients of the last backward pass are divided by the scale already."""
        return not self._enabled or self._round.of(optimizer).unscaled

    def _overflow_of_unscaled(self, optimizer: torch.optim.Optimizer) -> bool | None:
        state = self._round.optimizers.get(optimizer)
        return bool(state.overflow) if state is not None and state.unscaled and not state.stepped else None

    def _is_scaled_again(self, optimizer: torch.optim.Optimizer) -> None:
        self._round.of(optimizer).unscaled = False

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Un-scales the gradients if that has not been done, and steps ``optimizer`` unless one is not finite.

        Returns:
            What ``optimizer.step(*args, **kwargs)`` returns; ``None`` if the step was skipped.

        Raises:
            RuntimeError: ``optimizer`` has stepped already since the last :meth:`update`.
            InvalidArgument: there is a closure, which would compute gradients that are not un-scaled.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if any(argument is not None for argument in (*args, kwargs.get("closure"))):
            raise InvalidArgument(
                "a loss scaler cannot step with a closure: the gradients that it computes would stay scaled"
            )
        state = self._round.of(optimizer)
        if state.stepped:
            raise RuntimeError("step() has already been called since the last update().")
        fused = not state.unscaled and getattr(optimizer, "_step_supports_amp_scaling", False)
        if fused:
            gradients, known = _measured_gradients(optimizer)
            unknown = [gradient for key, gradient in gradients.items() if key not in known]
            self._note(state, [*known.values(), *measure_gradients(unknown)])
        elif not state.unscaled:
            self.unscale_(optimizer)
        state.stepped = True
        if state.overflow:
            return None
        return self._step_fused(optimizer) if fused else optimizer.step()

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """After the steps: lets the scale grow or back off, or sets it to ``new_scale``.

        A second call, after another optimizer has stepped on gradients of the same backward pass, replaces what the
        first call did: an overflow in any of them counts once.

        Raises:
            RuntimeError: no gradient has been checked since the last call.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._loss_scale.set(float(new_scale))
            self._round.updated = True
            return
        if not self._round.checked:
            raise RuntimeError("update() was called, but no optimizer has stepped since a loss was scaled.")
        self._loss_scale.restore(self._round.scale, self._round.growth_tracker, *self._settings())
        self._loss_scale.update(self._round.overflow)
        self._round.updated = True

    def get_scale(self) -> float:
        """The scale; 1.0 when the scaler is not enabled."""
        return self._loss_scale.value if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """The factor by which the scale grows."""
        return self._loss_scale.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the factor by which the scale grows; above 1."""
        self._restore(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """The factor of the scale after an overflow."""
        return self._loss_scale.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the factor of the scale after an overflow; between 0 and 1."""
        self._restore(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Steps without an overflow before the scale grows."""
        return self._loss_scale.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the steps without an overflow before the scale grows; at least 1."""
        self._restore(growth_interval=new_interval)

    def state_dict(self) -> dict[str, Any]:
        """The scale and its settings, under the names that ``torch.amp.GradScaler`` has; empty when not enabled."""
        return self._all_state() if self._enabled else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from what :meth:`state_dict`, or that of ``torch.amp.GradScaler``, returned.

        Raises:
            InvalidArgument: entries are missing (as when the saved scaler was not enabled) or out of range.
        """
        if not self._enabled:
            return
        missing = [name for name in _STATE if name not in state_dict]
        if missing:
            raise InvalidArgument(
                f"the state of a loss scaler lacks {', '.join(missing)}; was it saved by a scaler that is not enabled?"
            )
        self._restore(**{name: state_dict[name] for name in _STATE})
        # Gradients that are un-scaled are so still; others have the scale of their pass.
        waiting = {one: state for one, state in self._round.optimizers.items() if state.unscaled and not state.stepped}
        self._round = self._next_round()
        self._round.checked, self._round.overflow = bool(waiting), any(state.overflow for state in waiting.values())
        self._round.optimizers.update(waiting)

    def __getstate__(self) -> dict[str, Any]:
        return {"enabled": self._enabled, "state": self._all_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        settings = state["state"]
        self.__init__(  # type: ignore[misc]
            "cpu",
            settings["scale"],
            settings["growth_factor"],
            settings["backoff_factor"],
            settings["growth_interval"],
            state["enabled"],
        )
        self._restore(**settings)
        self._round = self._next_round()

    def _scaled(self, outputs: Any) -> Any:
        if isinstance(outputs, torch.Tensor):
            return outputs * self._round.scale
        if isinstance(outputs, Iterable):
            scaled = map(self._scaled, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise InvalidArgument(f"expected tensors, or iterables of tensors, to scale; found {type(outputs).__name__}")

    def _note(self, state: _OptimizerState, statistics: Iterable[tuple[float, int]]) -> None:
        found = any(num_non_finite > 0 for _, num_non_finite in statistics)
        self._round.note(state, found if self._any_rank is None else self._any_rank(found))

    def _step_fused(self, optimizer: Any) -> Any:
        optimizer.grad_scale = torch.tensor(self._round.scale, dtype=torch.float32)
        optimizer.found_inf = torch.zeros((), dtype=torch.float32)
        try:
            return optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        overflow = self._round.of(optimizer).overflow
        return {} if overflow is None else {"cpu": torch.tensor(float(overflow))}

    def _get_growth_tracker(self) -> int:
        return self._loss_scale.growth_tracker if self._enabled else 0

    def _settings(self) -> tuple[float, float, int]:
        return self.get_growth_factor(), self.get_backoff_factor(), self.get_growth_interval()

    def _all_state(self) -> dict[str, Any]:
        return dict(
            zip(_STATE, (self._loss_scale.value, *self._settings(), self._loss_scale.growth_tracker), strict=True)
        )

    def _restore(self, **changes: Any) -> None:
        state = {**self._all_state(), **changes}
        self._loss_scale.restore(
            state["scale"],
            state["_growth_tracker"],
            state["growth_factor"],
            state["backoff_factor"],
            state["growth_interval"],
        )

    def _next_round(self) -> _Round:
        return _Round(self._loss_scale.value, self._loss_scale.growth_tracker)


def overflowed(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool | torch.Tensor:
    """Whether gradients that ``optimizer`` was to step on were not finite; asked between its step and the update.

    Returns:
        On accelerators a tensor of one bool, which the device may still have to compute.
    """
    flags = list(scaler._found_inf_per_device(optimizer).values())
    if not flags:
        return False
    # Not a view: torch's scaler adds up flags of several optimizers in place.
    any_found = torch.stack([flag.to(flags[0].device, non_blocking=True) for flag in flags]).sum() > 0
    return any_found if any_found.device.type != "cpu" else bool(any_found)


# The optimizers for which each scaler has scaled losses, and those whose un-scaled gradients have been cleared.
_sharing: WeakKeyDictionary[torch.amp.GradScaler, WeakSet[torch.optim.Optimizer]] = WeakKeyDictionary()
_cleared: WeakKeyDictionary[torch.amp.GradScaler, WeakSet[torch.optim.Optimizer]] = WeakKeyDictionary()


def update_after_step(scaler: torch.amp.GradScaler) -> None:
    """Updates ``scaler``, an optimizer of which has stepped, unless another one has gradients to step on.

    Torch's scalers forget at an update whose gradients are un-scaled, and the scale that the others have.
    """
    if isinstance(scaler, GradScaler) or not any(
        _stage(scaler, optimizer) is not OptState.STEPPED and have_gradients(_parameters(optimizer))
        for optimizer in _sharing.get(scaler, ())
    ):
        scaler.update()


def settle(scaler: torch.amp.GradScaler | None) -> None:
    """Makes the update that :func:`update_after_step` left out, if nobody has made it."""
    if scaler is not None and not isinstance(scaler, GradScaler) and _waits_for_update(scaler):
        scaler.update()


def settle_before_step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """As :func:`settle`, if ``optimizer`` has stepped since then: a program may have scaled another loss by itself."""
    if _stage(scaler, optimizer) is OptState.STEPPED:
        settle(scaler)


def note_cleared(scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> None:
    """The gradients of ``optimizer`` have been cleared, perhaps instead of a step."""
    if scaler is not None and _overflow_of_unscaled(scaler, optimizer) is not None:
        _cleared.setdefault(scaler, WeakSet()).add(optimizer)


def scaled_loss(scaler: torch.amp.GradScaler, loss: Any, optimizers: Iterable[Any]) -> Any:
    """``loss`` times the scale, after an update that was left out.

    Its gradients may be added to those of ``optimizers``, prepared or not, that wait for a step: these are multiplied
    by the scale, too, if they are un-scaled (and un-scaled again by whatever comes next), or brought to it from the one
    that they have. If un-scaled gradients have been cleared instead, as a program does where they are not finite, the
    scale is updated as by a step.
    """
    inner = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
    _sharing.setdefault(scaler, WeakSet()).update(inner)
    waiting = [(one, flag) for one in inner if (flag := _overflow_of_unscaled(scaler, one)) is not None]
    cleared = _cleared.pop(scaler, WeakSet())
    left = [(one, flag) for one, flag in waiting if one not in cleared and have_gradients(_parameters(one))]
    updates = len(left) < len(waiting)
    scaled_before: list[torch.optim.Optimizer] = []
    if updates or _waits_for_update(scaler):
        scaled_before = [one for one in inner if _is_scaled(scaler, one) and have_gradients(_parameters(one))]
    before = scaler._round.scale if isinstance(scaler, GradScaler) else _scale_of(scaler, scaled_before)
    if updates:
        scaler.update()
    else:
        settle(scaler)
    scaled = scaler.scale(loss)
    for one, flag in left:
        _scale_again(scaler, one, flag)
    for one in scaled_before:
        _multiply(_values(one), lambda device: scaler.scale(torch.ones((), device=device)) / before)
    return scaled


def _scale_of(scaler: torch.amp.GradScaler, optimizers: Iterable[torch.optim.Optimizer]) -> torch.Tensor | float:
    """The scale of a scaler of torch's kind on the device of ``optimizers``, if there are any; 1.0 otherwise."""
    first = next((one for optimizer in optimizers for one in _parameters(optimizer)), None)
    return 1.0 if first is None else scaler.scale(torch.ones((), device=first.device)).clone()


def _waits_for_update(scaler: torch.amp.GradScaler) -> bool:
    """Whether the next loss gets another scale: the CPU's begins a round, torch's may still have to be updated."""
    if isinstance(scaler, GradScaler):
        return scaler.is_enabled() and scaler._round.updated
    return any(state["stage"] is OptState.STEPPED for state in getattr(scaler, "_per_optimizer_states", {}).values())


def _values(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The elements of the gradients of ``optimizer``, those that this process has."""
    gradients = (local_part(one.grad) for one in _parameters(optimizer) if one.grad is not None)
    return [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]


def _multiply(values: Iterable[torch.Tensor], factor_on: Callable[[torch.device], torch.Tensor]) -> None:
    factors: dict[torch.device, torch.Tensor] = {}
    for value in values:
        if value.device not in factors:
            factors[value.device] = factor_on(value.device)
        value.mul_(factors[value.device])


def _overflow_of_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool | torch.Tensor | None:
    """Whether gradients of ``optimizer`` were not finite; ``None`` if they are scaled, or have been stepped on."""
    if isinstance(scaler, GradScaler):
        return scaler._overflow_of_unscaled(optimizer)
    return overflowed(scaler, optimizer) if _stage(scaler, optimizer) is OptState.UNSCALED else None


def _scale_again(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, overflow: bool | torch.Tensor) -> None:
    """Multiplies un-scaled gradients by the scale, and those that are not zero by NaN after an ``overflow``, which
    clipping may have hidden."""
    values = _values(optimizer)
    _multiply(values, lambda device: scaler.scale(torch.ones((), device=device)))
    for value in values if overflow is not False else ():
        value.masked_fill_((value != 0) & torch.as_tensor(overflow, device=value.device), math.nan)
    if isinstance(scaler, GradScaler):
        scaler._is_scaled_again(optimizer)
    else:
        scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY


def _stage(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> OptState:
    """What a scaler of torch's kind has done for ``optimizer`` since its last update."""
    state = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    stage: OptState = state.get("stage", OptState.READY)
    return stage


def _is_scaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradients of ``optimizer`` are scaled still, and have not been stepped on."""
    if isinstance(scaler, GradScaler):
        return scaler.is_enabled() and not (scaler.is_unscaled(optimizer) or scaler._round.of(optimizer).stepped)
    return scaler.is_enabled() and _stage(scaler, optimizer) is OptState.READY


def _has_gradients(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether there is something to un-scale, on any rank; else a later backward pass may bring it, as that of another
    model."""
    found = have_gradients(_parameters(optimizer))
    any_rank: Callable[[bool], bool] | None = getattr(scaler, "_any_rank", None)
    return found if any_rank is None else any_rank(found)


def unscale_all(
    scaler: torch.amp.GradScaler | None, optimizers: Iterable[Any], left: Iterable[torch.Tensor] = ()
) -> dict[int, tuple[float | torch.Tensor, float | torch.Tensor]]:
    """Un-scales the gradients of ``optimizers``, prepared or not, that are scaled still.

    Args:
        left: parameters whose gradients the caller multiplies by the factors that it gets.

    Returns:
        As ``unscale_but`` of the scaler, of the gradients that were measured on the way.
    """
    measured: dict[int, tuple[float | torch.Tensor, float | torch.Tensor]] = {}
    if scaler is None:
        return measured
    keys = frozenset(map(id, left))
    for optimizer in optimizers:
        inner = getattr(optimizer, "optimizer", optimizer)
        if not _is_scaled(scaler, inner) or not _has_gradients(scaler, inner):
            continue
        if isinstance(scaler, (GradScaler, DeviceGradScaler)):
            measured.update(scaler.unscale_but(inner, keys))
        else:
            scaler.unscale_(inner)
    return measured
