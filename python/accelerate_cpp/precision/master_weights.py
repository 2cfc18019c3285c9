"""Optimizer steps in fp32 on parameters that are stored in bf16 or fp16."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from accelerate_cpp.errors import InvalidArgument

_LOW = (torch.float16, torch.bfloat16)
_KEY = "master_weights"


class MasterWeights(torch.optim.Optimizer):
    """Makes an optimizer step on fp32 copies of parameters in low precision, and rounds the results into the
    parameters.

    A bf16 number has 8 significant bits: a step smaller than 1/256 of a weight is lost when it is rounded. The copies,
    and the state of the optimizer, keep what the parameters cannot hold. They need 4 bytes more for each parameter, and
    those of the state that are in fp32 then. Parameters in fp32, and frozen ones, have no copies::

        optimizer = MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-4))
        model, optimizer = accelerator.prepare(model, optimizer)

    Parameter groups hold the model's own parameters, so that clipping, ``zero_grad`` and loss scalers find their
    gradients; schedulers are made with this optimizer. Parameters that something else writes to, such as
    ``load_state_dict`` of the model, are taken over by the next step, unless they are what the copies round to.

    Args:
        optimizer: an optimizer of ``torch.optim``, or one like it. It belongs to this one from now on.

    Raises:
        InvalidArgument: ``optimizer`` has a scheduler already, which would not reach this one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            raise InvalidArgument(
                f"MasterWeights: {type(optimizer).__name__} has a scheduler already; make the scheduler with the "
                "MasterWeights instead: MasterWeights(optimizer) first, then the scheduler"
            )
        self._inner = optimizer
        self._versions: dict[torch.Tensor, int] = {}
        groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        super().__init__(groups, optimizer.defaults)
        self._make_masters()
        self.state = optimizer.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer, in fp32; ``closure`` is called once, before it.

        Returns:
            What ``closure`` returned, or the optimizer's own ``step()``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._hand_on_options()
        self._make_masters()
        pairs = []
        for parameter, master in self._pairs():
            if parameter.grad is not None:
                self._follow(parameter, master)
                master.grad = parameter.grad.to(master.dtype)
                pairs.append((parameter, master))
        result = self._inner.step()
        for parameter, master in pairs:
            parameter.copy_(master)
            master.grad = None
            self._versions[master] = parameter._version
        return result if closure is None else loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in ``torch.optim.Optimizer``."""
        super().add_param_group(param_group)
        if len(self._inner.param_groups) < len(self.param_groups):  # not those that the constructor takes over
            group = self.param_groups[-1]
            self._inner.add_param_group({**group, "params": list(group["params"])})
            self._make_masters()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own, and under ``"master_weights"`` the copies, by the number of their parameter."""
        self._hand_on_options()
        masters = {
            number: master.detach()
            for number, (parameter, master) in enumerate(self._positions())
            if master is not parameter
        }
        return {**self._inner.state_dict(), _KEY: masters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state from :meth:`state_dict`, or one of an optimizer without copies, which then are created again.

        Raises:
            InvalidArgument: the copies are of other parameters.
        """
        self.check_state_dict(state_dict)
        masters = state_dict.get(_KEY)
        if masters is not None:
            self._load_masters(masters)
        self._inner.load_state_dict({name: value for name, value in state_dict.items() if name != _KEY})
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update({name: value for name, value in inner.items() if name != "params"})
        self.state = self._inner.state

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises if :meth:`load_state_dict` would because of the copies; changes nothing."""
        masters = state_dict.get(_KEY)
        if masters is None:
            return
        found = {number: tuple(master.shape) for number, master in masters.items()}
        expected = {number: tuple(master.shape) for number, (_, master) in self._copied().items()}
        if found != expected:
            raise InvalidArgument(
                f"the state of MasterWeights has copies of shapes {found}, by the number of the parameter; expected "
                f"{expected}: load it into an optimizer of the same parameters in low precision"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_inner": self._inner, "_versions": {}}

    def _load_masters(self, masters: dict[int, torch.Tensor]) -> None:
        with torch.no_grad():
            for number, (parameter, master) in self._copied().items():
                master.data = masters[number].to(parameter.device, master.dtype, copy=True)
        self._versions.clear()

    def _copied(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {number: pair for number, pair in enumerate(self._positions()) if pair[0] is not pair[1]}

    def _positions(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter, in the order of the groups, with what the optimizer steps on: itself or its copy."""
        own, inner = (
            chain.from_iterable(group["params"] for group in groups)
            for groups in (self.param_groups, self._inner.param_groups)
        )
        return zip(own, inner, strict=True)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((parameter, master) for parameter, master in self._positions() if master is not parameter)

    def _make_masters(self) -> None:
        """Makes the optimizer step on a copy of each parameter that should have one but has none."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            pairs = zip(group["params"], inner["params"], strict=True)
            inner["params"] = [self._master_of(own) if master is own else master for own, master in pairs]

    def _master_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """A new copy of ``parameter`` with its state, if it is in low precision and trained; else ``parameter``."""
        if parameter.dtype not in _LOW or not parameter.requires_grad:
            return parameter
        master = parameter.detach().float().requires_grad_()
        state = self._inner.state.pop(parameter, None)
        if state is not None:
            self._inner.state[master] = {
                name: value.float() if isinstance(value, torch.Tensor) and value.dtype in _LOW else value
                for name, value in state.items()
            }
        return master

    def _follow(self, parameter: torch.Tensor, master: torch.Tensor) -> None:
        """Moves ``master`` to the device of ``parameter``, unless it has been there since the last step."""
        if master.device != parameter.device:
            master.data = master.data.to(parameter.device)
        written = self._versions.get(master) != parameter._version
        if written and not torch.equal(master.to(parameter.dtype), parameter):
            master.copy_(parameter)

    def _hand_on_options(self) -> None:
        """Gives the optimizer the options of these groups, which schedulers and users change."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({name: value for name, value in group.items() if name != "params"})


def master_dtypes(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, torch.dtype]:
    """For each parameter of ``optimizer``, what its steps on it are computed in."""
    if isinstance(optimizer, MasterWeights):
        return {parameter: master.dtype for parameter, master in optimizer._positions()}
    return {parameter: parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
