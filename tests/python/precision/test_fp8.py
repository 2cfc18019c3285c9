"""The choice between the libraries, by what each of them needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate_cpp.config.session_config import Fp8Config
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.precision import fp8
from accelerate_cpp.precision.fp8 import convert_to_fp8, require_device

MODEL = torch.nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters())


def test_without_a_recipe_nothing_changes() -> None:
    assert convert_to_fp8(None, [MODEL], [OPTIMIZER], "cpu") == ([MODEL], [OPTIMIZER])


def test_torchao_converts_every_model_and_leaves_optimizers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8.fp8_torchao, "convert", lambda *arguments: arguments)
    options = {"config": 1}
    models, optimizers = convert_to_fp8(Fp8Config("AO", options), [MODEL, MODEL], [OPTIMIZER], "cpu")
    assert models == [(MODEL, options, "cpu")] * 2
    assert optimizers == [OPTIMIZER]


def test_the_others_take_one_model_with_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def convert(model: Any, optimizer: Any, options: Any) -> tuple[str, str]:
        seen.append((model, optimizer, options))
        return "model", "optimizer"

    monkeypatch.setitem(fp8._PAIRWISE, "TE", convert)  # type: ignore[arg-type]
    config = Fp8Config("TE", {"margin": 1})
    assert convert_to_fp8(config, [MODEL], [OPTIMIZER], "cuda") == (["model"], ["optimizer"])
    assert seen == [(MODEL, OPTIMIZER, {"margin": 1})]
    assert convert_to_fp8(config, [], [], "cuda") == ([], []), "data loaders can be prepared on their own"


@pytest.mark.parametrize(("models", "optimizers"), [(1, 0), (0, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("backend", ["TE", "MSAMP"])
def test_any_other_number_is_refused(backend: str, models: int, optimizers: int) -> None:
    with pytest.raises(InvalidArgument, match=f"one call, found {models} models and {optimizers} optimizers"):
        convert_to_fp8(Fp8Config(backend), [MODEL] * models, [OPTIMIZER] * optimizers, "cuda")


@pytest.mark.parametrize(("backend", "title"), [("TE", "TransformerEngine"), ("MSAMP", "MS-AMP")])
def test_libraries_for_gpus_are_refused_elsewhere(backend: str, title: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"{title} needs an NVIDIA GPU, .* on cpu; use AORecipeKwargs\(\)"):
        require_device(Fp8Config(backend), torch.device("cpu"))


def test_a_gpu_must_have_arithmetic_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = [(8, 9)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    require_device(Fp8Config("AO"), torch.device("cuda:0"))
    capability[0] = (8, 6)
    with pytest.raises(
        InvalidArgument, match=r"a GPU has compute capability 8\.6, .* needs 8\.9 or higher; use 'bf16'"
    ):
        require_device(Fp8Config("AO"), torch.device("cuda:0"))


def test_what_a_program_put_in_the_place_of_the_conversion_converts() -> None:
    called: list[object] = []
    options = {"config": "recipe", "module_filter": None}

    def convert(model: object, **others: object) -> None:
        called.append((model, others))

    models, _ = convert_to_fp8(Fp8Config("AO", options), [MODEL, MODEL], [OPTIMIZER], "cpu", convert)
    assert models == [MODEL, MODEL]
    assert called == [(MODEL, {"config": "recipe", "module_filter_func": None})] * 2
