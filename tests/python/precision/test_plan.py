"""Plans of precision: what they claim is what operations are seen to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accelerate_cpp.parallel.data_parallel import DataParallel
from accelerate_cpp.parallel.data_parallel_strategy import DataParallelStrategy
from accelerate_cpp.precision.fp8_torchao import convert
from accelerate_cpp.precision.plan import PlannedGroup, PrecisionPlan, plan_for
from accelerate_cpp.precision.precision import Precision, precision_for

CPU = torch.device("cpu")
MOVES = ("to_copy", "aten.t.", "view", "detach", "expand", "alias", "split", "slice", "chunk", "select", "copy_")


def planned(model: nn.Module, precision: str | Precision = "bf16", **changes: Any) -> PrecisionPlan:
    chosen = precision_for(precision, CPU) if isinstance(precision, str) else precision
    options: dict[str, Any] = {"casts": chosen.name != "no", "on_the_way": lambda _: (None, None), "master_dtypes": {}}
    return plan_for(model, chosen, **{**options, **changes})


def compute_dtypes(plan: PrecisionPlan) -> dict[str, torch.dtype | None]:
    return {name: group.compute_dtype for group in plan.groups for name in group.names}


class Watch(TorchDispatchMode):
    """Notes in which dtypes operations read parameters, or what parameters were merely moved or converted into."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}
        self._names: dict[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}
        self._kept: list[Any] = []  # so that no identity is used twice

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        moves = any(move in str(function) for move in MOVES)
        for tensor in self._tensors((args, kwargs)):
            name = self._names.get(id(tensor))
            if name is not None and moves:
                self._names |= {id(moved): name for moved in self._tensors(result)}
            elif name is not None:
                self.dtypes.setdefault(name, set()).add(tensor.dtype)
        self._kept.append((args, kwargs, result))
        return result

    @staticmethod
    def _tensors(data: Any) -> Iterator[torch.Tensor]:
        return (leaf for leaf in tree_leaves(data) if isinstance(leaf, torch.Tensor))


def seen(model: nn.Module, low: torch.dtype, *inputs: torch.Tensor) -> dict[str, torch.dtype]:
    watch = Watch(model)
    with torch.autocast("cpu", low), watch:
        model(*inputs)
    assert all(len(dtypes) == 1 for dtypes in watch.dtypes.values())
    return {name: next(iter(dtypes)) for name, dtypes in watch.dtypes.items()}


LAYERS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Linear(8, 8), (4, 8)),
    (nn.Conv1d(8, 8, 3), (4, 8, 8)),
    (nn.ConvTranspose2d(8, 8, 3), (4, 8, 8, 8)),
    (nn.GRU(8, 8), (3, 4, 8)),
    (nn.LSTMCell(8, 8), (4, 8)),
    (nn.PReLU(), (4, 8)),
    (nn.LayerNorm(8), (4, 8)),
    (nn.RMSNorm(8), (4, 8)),
    (nn.GroupNorm(2, 8), (4, 8, 3)),
    (nn.BatchNorm1d(8), (4, 8)),
    (nn.InstanceNorm1d(8, affine=True), (4, 8, 5)),
]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda value: type(value).__name__)
def test_layers_are_computed_in_what_the_plan_says(
    layer: nn.Module, shape: tuple[int, ...], storage: torch.dtype
) -> None:
    layer.to(storage)
    assert compute_dtypes(planned(layer)) == seen(layer, torch.bfloat16, torch.randn(shape).bfloat16())


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_tables_are_looked_up_as_they_are_stored(storage: torch.dtype) -> None:
    table = nn.Embedding(4, 8).to(storage)
    assert (
        compute_dtypes(planned(table, "fp16")) == seen(table, torch.float16, torch.tensor([1])) == {"weight": storage}
    )


def test_attention_is_computed_in_what_the_plan_says() -> None:
    attention, x = nn.MultiheadAttention(8, 2), torch.randn(3, 4, 8)
    assert compute_dtypes(planned(attention, "fp16")) == seen(attention, torch.float16, x, x, x)


def test_converted_layers_read_their_weights_in_fp8() -> None:
    from torchao.float8 import Float8LinearConfig

    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    convert(model, {"config": Float8LinearConfig(), "module_filter": None}, "cpu")
    dtypes = compute_dtypes(planned(model, "fp8"))
    assert dtypes == {
        "0.weight": torch.bfloat16,
        "0.bias": torch.bfloat16,
        "1.weight": torch.float8_e4m3fn,
        "1.bias": torch.bfloat16,
        "2.weight": torch.bfloat16,
        "2.bias": torch.bfloat16,
    }
    assert dtypes["1.bias"] == seen(model, torch.bfloat16, torch.randn(2, 16))["1.bias"]
    assert compute_dtypes(planned(model, "fp8", casts=False))["1.weight"] == torch.float8_e4m3fn


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


class OwnLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


def test_of_layers_that_are_not_torchs_own_nothing_is_claimed() -> None:
    assert compute_dtypes(planned(Own())) == {"scale": None}
    assert compute_dtypes(planned(OwnLinear(1, 1))) == {"weight": None, "bias": None}


def test_where_nothing_is_cast_all_compute_as_they_are_stored() -> None:
    model = nn.Sequential(Own(), nn.Linear(2, 2).bfloat16())
    for plan in (planned(model, "no"), planned(model, casts=False)):
        assert compute_dtypes(plan) == {
            "0.scale": torch.float32,
            "1.weight": torch.bfloat16,
            "1.bias": torch.bfloat16,
        }
    assert compute_dtypes(planned(nn.Linear(1, 1).double()))["weight"] == torch.float64


def test_other_devices_normalize_in_a_precision_that_is_not_claimed() -> None:
    gpu = Precision("bf16", torch.bfloat16, "cuda")
    assert compute_dtypes(planned(nn.LayerNorm(4), gpu))["weight"] == torch.float32
    assert compute_dtypes(planned(nn.LayerNorm(4).bfloat16(), gpu))["weight"] is None


def test_gradients_of_trained_parameters_travel_as_they_are_stored() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).requires_grad_(False))
    masters = dict.fromkeys(model.parameters(), torch.float32)
    strategy = DataParallelStrategy(CPU, {})
    wrapper = object.__new__(DataParallel)  # of which only the class is asked
    on_the_way = partial(strategy.dtypes_on_the_way, wrapper)
    trained, half, frozen = planned(model, on_the_way=on_the_way, master_dtypes=masters).groups
    assert (trained.reduce_dtype, half.reduce_dtype, frozen.reduce_dtype) == (torch.float32, torch.bfloat16, None)
    assert (trained.master_dtype, half.master_dtype, frozen.master_dtype) == (torch.float32, torch.float32, None)
    alone = planned(model).groups[0]
    assert (alone.reduce_dtype, alone.master_dtype) == (None, None)


def test_parameters_that_are_gathered_in_16_bits_are_read_in_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    gathered = planned(model, on_the_way=lambda _: (torch.bfloat16, torch.float32))
    assert set(compute_dtypes(gathered).values()) == {torch.bfloat16}
    assert {group.reduce_dtype for group in gathered.groups} == {torch.float32}
    assert {group.storage_dtype for group in gathered.groups} == {torch.float32}


def test_a_shared_parameter_is_listed_once() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    (group,) = planned(model).groups
    assert (group.layer, group.names, group.num_elements) == ("Embedding", ("0.weight",), 16)


def test_a_plan_cannot_be_changed() -> None:
    plan = planned(nn.Linear(1, 1))
    with pytest.raises(FrozenInstanceError):
        plan.precision = "fp8"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        plan.groups[0].layer = "other"  # type: ignore[misc]


def test_it_prints_as_a_table() -> None:
    plan = PrecisionPlan(
        "bf16",
        "cpu",
        (
            PlannedGroup("Linear", ("a", "b"), 1234, torch.float32, torch.bfloat16, torch.float32, torch.float32),
            PlannedGroup("Own", ("c",), 1, torch.bfloat16, None, None, None),
        ),
    )
    assert str(plan).splitlines() == [
        "mixed_precision='bf16' on cpu",
        "layer   parameters  elements  storage   compute        reduce   master",
        "Linear           2     1,234  float32   bfloat16       float32  float32",
        "Own              1         1  bfloat16  per operation  -        -",
    ]
