"""The schedule of Megatron-LM: warm-up and decay of learning rates, and of weight decay, by samples."""

from __future__ import annotations

import math
from typing import Any

from accelerate_cpp.errors import InvalidArgument

__all__ = ["MegatronSchedule"]

_DECAYS = ("constant", "linear", "cosine", "inverse-square-root")
_WHERE = ("num_samples", "iteration", "consumed_samples")
_INCREMENTS = ("constant", "linear", "cosine")


class MegatronSchedule:
    """Learning rates rise linearly from 0 during the warm-up, then fall to ``min_lr``.

    The largest rate of each parameter group is what it has at the beginning. Weight decay changes in groups that have
    some.

    Args:
        optimizer: whose groups are changed.
        plugin: a ``MegatronLMPlugin`` with the lengths, in steps of the optimizer (``..._iters``) or samples.
        global_batch_size: samples per step, over all processes.

    Attributes:
        num_samples: how far the schedule is.
        iteration, consumed_samples: how far the engine is, which also counts steps that were skipped.

    Raises:
        InvalidArgument: there is no such style, or no length.
    """

    def __init__(self, optimizer: Any, plugin: Any, global_batch_size: int) -> None:
        if plugin.lr_decay_style not in _DECAYS:
            raise InvalidArgument(
                f"MegatronLMPlugin: lr_decay_style={plugin.lr_decay_style!r}; expected one of {', '.join(_DECAYS)}"
            )
        if plugin.weight_decay_incr_style not in _INCREMENTS:
            raise InvalidArgument(
                f"MegatronLMPlugin: weight_decay_incr_style={plugin.weight_decay_incr_style!r}; expected one of "
                f"{', '.join(_INCREMENTS)}"
            )
        self.optimizer, self.samples_per_step = optimizer, global_batch_size
        self._style, self._decay_style = plugin.lr_decay_style, plugin.weight_decay_incr_style
        whole = _samples("train", plugin.train_iters, plugin.train_samples, global_batch_size)
        self._decay = _samples("lr_decay", plugin.lr_decay_iters, plugin.lr_decay_samples, global_batch_size) or whole
        if not whole or not self._decay:
            raise InvalidArgument(
                "MegatronLMPlugin: a schedule needs its length; pass train_iters or train_samples, or a "
                "MegatronLMDummyScheduler with total_num_steps"
            )
        if plugin.lr_warmup_fraction is not None:
            self._warmup = plugin.lr_warmup_fraction * self._decay
        else:
            self._warmup = _samples("lr_warmup", plugin.lr_warmup_iters, plugin.lr_warmup_samples, global_batch_size)
        if not 0 <= self._warmup < self._decay:
            raise InvalidArgument(
                f"MegatronLMPlugin: the warm-up takes {self._warmup:g} samples, but rates decay over {self._decay:g}; "
                "expected a shorter warm-up"
            )
        self._whole, self._lowest = whole, float(plugin.min_lr)
        self._weight_decays = plugin.start_weight_decay, plugin.end_weight_decay
        if self._decay_style != "constant" and None in self._weight_decays:
            raise InvalidArgument(
                f"MegatronLMPlugin: weight_decay_incr_style={self._decay_style!r} needs start_weight_decay and "
                "end_weight_decay"
            )
        self._largest = [float(group["lr"]) for group in optimizer.param_groups]
        self._decaying = [bool(group.get("weight_decay")) for group in optimizer.param_groups]
        self.num_samples = 0
        self.iteration = self.consumed_samples = 0
        self._set()

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        """Goes on by the samples of one step."""
        self.num_samples += self.samples_per_step
        self._set()

    def get_last_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float]:
        """The same as :meth:`get_last_lr`."""
        return self.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule and the engine are, and the largest rates."""
        where = {name: getattr(self, name) for name in _WHERE}
        return {**where, "largest": list(self._largest)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a state of :meth:`state_dict`."""
        for name in _WHERE:
            setattr(self, name, state_dict[name])
        self._largest = list(state_dict["largest"])
        self._set()

    def _set(self) -> None:
        groups = zip(self.optimizer.param_groups, self._largest, self._decaying, strict=True)
        for group, largest, decays in groups:
            group["lr"] = self._rate(largest)
            if self._decay_style != "constant" and decays:
                group["weight_decay"] = self._weight_decay()

    def _rate(self, largest: float) -> float:
        done = self.num_samples
        if self._warmup and done <= self._warmup:
            return float(largest * done / self._warmup)
        if self._style == "constant":
            return largest
        if done > self._decay:
            return self._lowest
        if self._style == "inverse-square-root":
            return max(self._lowest, largest * math.sqrt(max(self._warmup, 1) / max(done, 1)))
        part = (done - self._warmup) / (self._decay - self._warmup)
        left = 1 - part if self._style == "linear" else (math.cos(math.pi * part) + 1) / 2
        return float(self._lowest + left * (largest - self._lowest))

    def _weight_decay(self) -> float:
        first, last = self._weight_decays
        part = min(1.0, self.num_samples / self._whole)
        gained = part if self._decay_style == "linear" else (math.cos(math.pi * (1 - part)) + 1) / 2
        return float(first + gained * (last - first))


def _samples(name: str, steps: int | None, samples: int | None, per_step: int) -> float:
    if steps and samples:
        raise InvalidArgument(f"MegatronLMPlugin: {name}_iters={steps} and {name}_samples={samples}; pass one of them")
    return float(steps * per_step if steps else samples or 0)
