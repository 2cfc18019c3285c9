"""Checkpoints of which one part does not fit what is to load it: nothing is changed. In one process."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_cpp import Accelerator
from accelerate_cpp.checkpoint import random_states as random_states_module
from accelerate_cpp.checkpoint.manifest import MANIFEST_NAME
from accelerate_cpp.checkpoint.random_states import random_states
from accelerate_cpp.data.cursor import cursor_of
from accelerate_cpp.devices.device import Device
from accelerate_cpp.precision.master_weights import MasterWeights
from accelerate_cpp.state import AcceleratorState, GradientState
from accelerate_cpp.utils import DataLoaderConfiguration

pytestmark = pytest.mark.usefixtures("fresh_state")


class Counter:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Run:
    """Two models, two optimizers, a schedule, a loader that continues, a loss scale and two objects of the user's."""

    def __init__(
        self,
        seed: int,
        last_width: int = 1,
        schedule: Callable[..., Any] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        wrap: Callable[..., Any] = lambda optimizer: optimizer,
        optimized: slice = slice(None),
    ) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.manual_seed(seed)
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision="fp16",
            gradient_accumulation_steps=4,
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
        )
        self.model, self.head = torch.nn.Linear(3, 2), torch.nn.Linear(2, last_width).to(torch.bfloat16)
        body = torch.optim.Adam(list(self.model.parameters())[optimized], lr=0.1 + seed)
        head = wrap(torch.optim.Adam(self.head.parameters(), lr=0.2 + seed))
        loader: DataLoader[Any] = DataLoader(torch.randn(8, 3), batch_size=2, shuffle=True)  # type: ignore[arg-type]
        prepared = self.accelerator.prepare(self.model, self.head, body, head, schedule(head), loader)
        self.body, self.optimizer, self.schedule, self.loader = prepared[2:]
        self.objects = [Counter(seed), Counter(seed + 1)]
        self.accelerator.register_for_checkpointing(*self.objects)
        for _, _batch in zip(range(1 + seed), self.loader, strict=False):
            for optimizer, model in ((self.body, self.model), (self.optimizer, self.head)):
                for weight in model.parameters():
                    weight.grad = torch.full_like(weight, 0.1 + seed)
                optimizer.optimizer.step()
            self.schedule.scheduler.step()
        self.accelerator.step = 1 + seed
        assert self.accelerator.scaler is not None
        self.accelerator.scaler.load_state_dict({**self.accelerator.scaler.state_dict(), "scale": 2.0 ** (3 + seed)})

    def state(self) -> dict[str, Any]:
        """All that a checkpoint has, by value."""
        state: dict[str, Any] = {
            "models": [model.state_dict() for model in (self.model, self.head)],
            "optimizers": [one.state_dict() for one in (self.body, self.optimizer)],
            "schedule": {key: value for key, value in self.schedule.state_dict().items() if "lambda" not in key},
            "loader": (cursor_of(self.loader), repr(self.loader.progress.next_start)),
            "scaler": self.accelerator.scaler.state_dict(),
            "objects": [one.value for one in self.objects],
            "step": self.accelerator.step,
            "random": (random.getstate(), np.random.get_state(), torch.get_rng_state()),
        }
        return copy.deepcopy(state)


def plain(value: Any) -> Any:
    """``value`` with lists in place of tensors and arrays."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def without_loader(state: dict[str, Any]) -> dict[str, Any]:
    """A loader that continues somewhere tells so only once it does."""
    return {name: value for name, value in state.items() if name != "loader"}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert plain(one) == plain(other)


def rewritten(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """What gives a file of a folder another content. The folder then is as one of the original, without checksums."""

    def rewrite(folder: Path) -> None:
        (folder / MANIFEST_NAME).unlink()
        torch.save(change(torch.load(folder / name, weights_only=False)), folder / name)

    return rewrite


def nothing(_folder: Path) -> None:
    """Leaves a checkpoint as it is."""


def without(key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {name: value for name, value in state.items() if name != key}


def cut(folder: Path) -> None:
    (folder / MANIFEST_NAME).unlink()
    content = (folder / "custom_checkpoint_1.pkl").read_bytes()
    (folder / "custom_checkpoint_1.pkl").write_bytes(content[: len(content) // 2])


def lambdas(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def with_other_moments(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": {**state["state"], 1: {**state["state"][1], "exp_avg": torch.zeros(7)}}}


MISFITS: dict[str, tuple[dict[str, Any], Callable[[Path], None], str]] = {
    "shape of the last model": (
        {"last_width": 5},
        rewritten("optimizer_1.bin", lambda state: {**state, "state": {}}),
        r"model_1.safetensors does not fit Linear: shapes differ: weight",
    ),
    "name in the first model": (
        {},
        lambda folder: (folder / "model.safetensors").rename(folder / "model_1.safetensors") and None,
        "missing",
    ),
    "groups of an optimizer": ({"optimized": slice(1)}, nothing, r"optimizer\.bin has parameter groups of sizes \[2\]"),
    "moments": ({}, rewritten("optimizer_1.bin", with_other_moments), r"optimizer_1\.bin does not fit Adam"),
    "kind of an optimizer's state": ({}, rewritten("optimizer_1.bin", lambda _: [1]), "expected a dict, found list"),
    "copies of weights": (
        {"wrap": MasterWeights},
        rewritten("optimizer_1.bin", lambda state: {**state, "master_weights": {0: torch.zeros(9)}}),
        "copies of shapes",
    ),
    "kind of schedule": ({"schedule": lambdas}, nothing, r"scheduler\.bin lacks lr_lambdas"),
    "cursor of a loader": (
        {},
        rewritten("dl_state_dict.bin", lambda state: without("epoch")(state.get("_cursor", state))),
        "epoch is missing",
    ),
    "loss scale": ({}, rewritten("scaler.pt", without("scale")), r"scaler\.pt lacks scale"),
    "random state": (
        {},
        rewritten("random_states_0.pkl", lambda state: {**state, "torch_manual_seed": torch.zeros(3).byte()}),
        "'torch_manual_seed' does not fit",
    ),
    "object of the user's": ({}, cut, r"custom_checkpoint_1\.pkl"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_one_part_that_does_not_fit_leaves_all_as_they_were(tmp_path: Path, misfit: str) -> None:
    options, change, message = MISFITS[misfit]
    Run(seed=0).accelerator.save_state(tmp_path / "c")
    change(tmp_path / "c")
    run = Run(seed=1, **options)
    before = run.state()
    with pytest.raises(RuntimeError, match=message):
        run.accelerator.load_state(tmp_path / "c")
    assert_equal(run.state(), before)


def test_all_that_fits_is_loaded(tmp_path: Path) -> None:
    saved = Run(seed=0)
    saved.accelerator.save_state(tmp_path / "c")
    expected = saved.state()
    run = Run(seed=1)
    run.accelerator.load_state(tmp_path / "c")
    assert_equal(without_loader(run.state()), without_loader(expected))
    assert run.loader.progress.next_start is not None


def test_a_hook_sees_models_only_once_all_else_was_found_to_fit(tmp_path: Path) -> None:
    Run(seed=0).accelerator.save_state(tmp_path / "c")
    run, called = Run(seed=1, optimized=slice(1)), []
    run.accelerator.register_load_state_pre_hook(lambda *_: called.append(True))
    with pytest.raises(RuntimeError, match="groups"):
        run.accelerator.load_state(tmp_path / "c")
    assert called == []


class Gpus(Device):
    """As much of a kind of device as checkpoints look at, with generators of a byte each."""

    def __init__(self, *states: int) -> None:
        super().__init__(type="cuda", title="GPU")
        object.__setattr__(self, "states", [torch.tensor([state], dtype=torch.uint8) for state in states])

    def random_states(self) -> list[torch.Tensor]:
        return [state.clone() for state in self.states]

    def set_random_states(self, states: Sequence[torch.Tensor]) -> None:
        for index, state in enumerate(states):
            self.states[index] = state.clone()  # IndexError for a device that is not here


@pytest.mark.parametrize(
    ("saved", "expected", "warning"),
    [
        ((1, 2, 3), [1, 2], "'torch_cuda_manual_seed' of 3 devices for 2 devices here"),
        ((1,), [1, 9], "'torch_cuda_manual_seed' of 1 devices for 2 devices here"),
        ((), [9, 9], "random states 'torch_cuda_manual_seed'"),
        ((1, 2), [1, 2], None),
    ],
)
def test_random_states_of_more_or_fewer_gpus_are_loaded_as_far_as_they_go_with_one_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    saved: tuple[int, ...],
    expected: list[int],
    warning: str | None,
) -> None:
    def has(gpus: Gpus | None) -> None:
        found = {} if gpus is None else {"torch_cuda_manual_seed": gpus}
        monkeypatch.setattr(random_states_module, "_kinds", lambda: found)

    has(Gpus(*saved) if saved else None)
    first = Run(seed=0)
    first.accelerator.save_state(tmp_path / "c")
    value = first.state()
    gpus = Gpus(9, 9)
    has(gpus)
    run = Run(seed=1)
    with caplog.at_level(logging.WARNING):
        run.accelerator.load_state(tmp_path / "c")
    assert [state.item() for state in gpus.states] == expected
    assert_equal(without_loader(run.state()), without_loader(value))
    warnings = [record.getMessage() for record in caplog.records if "keep their current state" in record.getMessage()]
    assert [warning in text for text in warnings] == ([] if warning is None else [True])


def test_a_gpus_state_of_another_form_is_found_before_anything_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Gpus(1)
    monkeypatch.setattr(random_states_module, "_kinds", lambda: {"torch_cuda_manual_seed": gpus})
    Run(seed=0).accelerator.save_state(tmp_path / "c")
    rewritten(
        "random_states_0.pkl", lambda state: {**state, "torch_cuda_manual_seed": [torch.zeros(2, dtype=torch.uint8)]}
    )(tmp_path / "c")
    run = Run(seed=1)
    before = run.state()
    with pytest.raises(RuntimeError, match="'torch_cuda_manual_seed' does not fit"):
        run.accelerator.load_state(tmp_path / "c")
    assert_equal(run.state(), before)


def test_all_that_is_missing_is_told_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Run(seed=0).accelerator.save_state(tmp_path / "c")
    (tmp_path / "c" / MANIFEST_NAME).unlink()
    (tmp_path / "c" / "scaler.pt").unlink()
    (tmp_path / "c" / "random_states_0.pkl").unlink()
    run = Run(seed=1)
    drawn = random_states(0)
    with caplog.at_level(logging.WARNING):
        run.accelerator.load_state(tmp_path / "c")
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "scaler.pt" in told
    assert "random_states_0.pkl is missing" in told
    assert torch.equal(torch.get_rng_state(), drawn["torch_manual_seed"])
    assert run.accelerator.step == 2
