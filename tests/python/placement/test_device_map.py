"""Device maps: the same as the original's, on random and on real shapes of models, and their cleaning and checking."""

from __future__ import annotations

import logging
import random
import time
import warnings
from typing import Any

import accelerate.utils as original
import accelerate.utils.modeling as original_modeling
import pytest
import torch
from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement import device_map, device_memory
from accelerate_cpp.placement.device_map import (
    check_device_map,
    choose_device_map,
    clean_device_map,
    get_module_size_with_ties,
    infer_auto_device_map,
)
from accelerate_cpp.placement.first_fit import device_of
from accelerate_cpp.placement.module_sizes import compute_module_sizes
from accelerate_cpp.placement.workload import Workload

original_map: Any = original.infer_auto_device_map


@pytest.fixture(autouse=True)
def _without_logs_of_absent_gpus() -> Any:
    """The maps name GPUs that this machine need not have."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class Block(nn.Module): ...


class Whole(nn.Module): ...


class Trees:
    """Random small models. No name is part of another: the original takes such names for each other."""

    def __init__(self, seed: int, ties: bool) -> None:
        self.random = random.Random(seed)
        self._count = 0
        self.model = self._tree(self.random.randint(1, 4))
        if ties:
            self._tie()

    def _name(self) -> str:
        self._count += 1
        return f"n{self._count:04d}"

    def _tree(self, depth: int) -> nn.Module:
        choose = self.random
        module = Whole() if choose.random() < 0.25 else Block()
        if choose.random() < 0.3:
            setattr(module, self._name(), nn.Parameter(torch.zeros(choose.randint(1, 6), device="meta")))
        for _ in range(choose.randint(1, 4)):
            kind = choose.random()
            if depth == 0 or kind < 0.5:
                child: nn.Module = nn.Linear(
                    choose.randint(1, 4), choose.randint(1, 4), bias=choose.random() < 0.5, device="meta"
                )
                if choose.random() < 0.2:
                    child.register_buffer("table", torch.zeros(choose.randint(1, 4), device="meta"))
            else:
                child = nn.ReLU() if kind < 0.6 else self._tree(depth - 1)
            setattr(module, self._name(), child)
        return module

    def _tie(self) -> None:
        """One pair at most: with several groups the original's choice depends on the order of a set."""
        layers = [module for module in self.model.modules() if isinstance(module, nn.Linear)]
        pairs = [(a, b) for a in layers for b in layers if a is not b and a.weight.shape == b.weight.shape]
        if pairs:
            first, second = self.random.choice(pairs)
            second.weight = first.weight

    def options(self) -> dict[str, Any]:
        choose, total = self.random, int(compute_module_sizes(self.model)[""])
        memory: dict[Any, Any] = {
            number: choose.randint(0, max(1, total * 4 // 5)) for number in range(choose.randint(0, 3))
        }
        if choose.random() < 0.7 or not memory:
            memory["cpu"] = choose.randint(0, total * 6 // 5)
        return {
            "max_memory": memory,
            "no_split_module_classes": choose.choice([None, ["Whole"], "Whole"]),
            "dtype": choose.choice([None, torch.float16]),
            "clean_result": choose.random() < 0.5,
            "fallback_allocation": choose.random() < 0.4,
            "offload_buffers": choose.random() < 0.5,
        }


def outcome(infer: Any, model: nn.Module, options: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The map, and the number of warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return dict(infer(model, **{**options, "max_memory": dict(options["max_memory"])})), len(caught)


def offloaded(found: tuple[dict[str, Any], int]) -> bool:
    return bool({"cpu", "disk"} & {*found[0].values()})


def loads(model: nn.Module, devices: dict[str, Any], dtype: torch.dtype | None) -> dict[Any, float]:
    """Bytes on each device; tensors with two names count once."""
    found: dict[Any, float] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        device = device_of(devices, name)
        size = tensor.element_size() if dtype is None else min(dtype.itemsize, tensor.element_size())
        found[device] = found.get(device, 0) + tensor.numel() * size
    return found


@pytest.mark.parametrize("ties", [False, True])
def test_maps_of_random_models_are_those_of_the_original_unless_it_offloads_what_fits(ties: bool) -> None:
    compared = kept = 0
    for seed in range(400):
        tree = Trees(seed, ties)
        options = tree.options()
        found = outcome(infer_auto_device_map, tree.model, options)
        check_device_map(tree.model, found[0])
        try:
            expected = outcome(original_map, tree.model, options)
        except IndexError:  # shared parameters in parts that the original has placed or split before
            continue
        compared += 1
        if offloaded(expected) and not offloaded(found):
            kept += 1
            for device, load in loads(tree.model, found[0], options["dtype"]).items():
                assert load <= options["max_memory"][device], (seed, options)
            continue
        assert found[0] == expected[0], (seed, options)
        assert ties or found[1] == expected[1]  # it does not count the buffers of modules that go along with others
    assert compared >= 350
    assert kept >= 10


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Transformer(nn.Module):
    """As language models are built: embeddings that the head shares, layers, a norm, the head."""

    def __init__(self, layers: int, width: int = 16, words: int = 100, tied: bool = True) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embeddings.weight


class EncoderDecoder(nn.Module):
    """Both halves share the embeddings, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(100, 16)
        self.encoder, self.decoder = Transformer(3, tied=False), Transformer(4, tied=False)
        self.encoder.embeddings.weight = self.decoder.embeddings.weight = self.shared.weight


def vision() -> nn.Module:
    stages = [nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(nn.Conv2d(3, 8, 7), *stages, nn.Linear(8, 10))


SHAPES: dict[str, Any] = {
    "tied": lambda: Transformer(6),
    "untied": lambda: Transformer(6, tied=False),
    "wide head": lambda: Transformer(3, words=3000),
    "encoder-decoder": EncoderDecoder,
    "vision": vision,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("whole", [None, ["Layer"], ["Attention", "Sequential"]])
def test_maps_of_transformers_are_those_of_the_original(shape: str, whole: list[str] | None) -> None:
    model = SHAPES[shape]().to("meta")
    total = int(compute_module_sizes(model)[""])
    for tenths in range(1, 16):
        for memory in ({0: total * tenths // 10, "cpu": total // 3}, {0: total // 5, 1: total * tenths // 20}):
            options = {"max_memory": memory, "no_split_module_classes": whole}
            assert outcome(infer_auto_device_map, model, options) == outcome(original_map, model, options), memory


def test_it_takes_a_fraction_of_the_time_of_the_original() -> None:
    model = Transformer(182).to("meta")
    total = int(compute_module_sizes(model)[""])
    assert len(list(model.modules())) > 2000

    def seconds(infer: Any) -> float:
        def once() -> float:
            begin = time.process_time()
            infer(model, max_memory={0: total // 4, 1: total // 4, 2: total // 4, "cpu": total})
            return time.process_time() - begin

        return min(once() for _ in range(5))

    assert seconds(infer_auto_device_map) < seconds(original_map) / 2  # a fifth; the rest is for noisy machines


def test_saved_buffers_of_a_module_that_is_split_have_a_device_too() -> None:
    block = Block()
    block.first, block.second = nn.Linear(4, 4), nn.Linear(4, 4)
    block.register_buffer("saved", torch.zeros(4))
    block.register_buffer("other", torch.zeros(4), persistent=False)
    model = nn.Sequential(block)
    found = infer_auto_device_map(model, {0: 165, "cpu": 1000}, offload_buffers=True)
    assert found == {"0.first": 0, "0.second": 0, "0.saved": "cpu"}
    check_device_map(model, found)


def test_shared_modules_and_parameters_are_placed_where_the_original_fails() -> None:
    model = Block()
    model.a = model.b = nn.Linear(4, 4, bias=False)
    model.c = nn.Linear(4, 4, bias=False)
    model.d = Block()
    model.d.x, model.d.y = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    model.d.w = model.c.weight
    with pytest.raises(IndexError):
        original_map(model, {0: 200, "cpu": 10000})
    found = infer_auto_device_map(model, {0: 200, "cpu": 10000})
    assert found == {"a": 0, "b": 0, "c": 0, "d.w": 0, "d.x": "cpu", "d.y": "cpu"}
    check_device_map(model, found)


def test_decisions_are_printed_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(nn.Sequential(nn.Linear(2, 2)), {"cpu": 100})
    assert capsys.readouterr().out == ""
    infer_auto_device_map(nn.Sequential(nn.Linear(2, 2)), {"cpu": 100}, verbose=True)
    assert capsys.readouterr().out == "0: 24 bytes, to cpu\n"


def test_room_without_an_end_is_for_the_disk_only() -> None:
    assert infer_auto_device_map(nn.Linear(1, 1), {"disk": None}) == {"": "disk"}  # type: ignore[dict-item]
    with pytest.raises(InvalidArgument, match=r"max_memory\['cpu'\] is None"):
        infer_auto_device_map(nn.Linear(1, 1), {"cpu": None})  # type: ignore[dict-item]


def test_balanced_takes_the_best_partition_in_order() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(7)))
    memory: dict[Any, Any] = {0: 1000, 1: 1000, 2: 1000, "cpu": 1000}
    devices = list(choose_device_map(model, "balanced", memory).values())
    assert devices == sorted(devices)
    assert sorted(devices.count(gpu) for gpu in range(3)) == [2, 2, 3]
    assert choose_device_map(model, "balanced", {0: 64, 1: 384, "cpu": 0}) == {
        "0": 0,
        **{str(n): 1 for n in range(1, 7)},
    }


@pytest.mark.parametrize("way", ["auto", "balanced_low_0"])
def test_ways_that_lower_the_room_look_for_a_fit_in_all_of_it(way: str) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(10)))
    memory: dict[Any, Any] = {0: 64 * 9, 1: 64 * 2, "cpu": 10_000}
    lowered = original.get_balanced_memory(model, dict(memory), low_zero=way == "balanced_low_0")
    assert lowered[0] < memory[0]
    assert way == "balanced_low_0" or offloaded((original_map(model, max_memory=lowered), 0))
    found = choose_device_map(model, way, memory)
    assert loads(model, found, None) == {0: 64 * 8, 1: 64 * 2}


def test_low_zero_stays_low_where_that_fits() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
    memory: dict[Any, Any] = {0: 1000, 1: 64 * 3, 2: 64 * 2, "cpu": 10_000}
    found = choose_device_map(model, "balanced_low_0", memory)
    assert loads(model, found, None) == {0: 64, 1: 64 * 3, 2: 64 * 2}


@pytest.mark.parametrize("way", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_without_accelerators_the_way_does_not_matter(way: str) -> None:
    model = Transformer(3).to("meta")
    assert choose_device_map(model, way, {"cpu": 10_000}) == original_map(model, max_memory={"cpu": 10_000})


def test_of_an_only_gpu_nine_tenths_of_what_is_free_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {0: 1000, "cpu": 5000}
    monkeypatch.setattr(device_memory, "_free_memory", lambda: dict(free))
    model = nn.Sequential(nn.Linear(10, 15, bias=False), nn.Linear(10, 9, bias=False))  # 960 bytes
    for way in ("auto", "balanced", "balanced_low_0"):
        assert offloaded((choose_device_map(model, way), 0))
        assert choose_device_map(model, way, {0: 1000, "cpu": 5000}) == {"": 0}
    assert choose_device_map(model, "sequential") == {"": 0}


def test_room_is_left_for_a_workload() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    memory: dict[Any, Any] = {0: 64 * 2, 1: 64 * 2, 2: 64 * 2, "cpu": 10_000}
    assert not offloaded((infer_auto_device_map(model, memory), 0))
    held = Workload(class_bytes={"Linear": 22})
    for find in (infer_auto_device_map, choose_device_map):
        assert offloaded((find(model, max_memory=memory, workload=held), 0))  # one of 86 bytes fits on each
    spared = Workload(activation_bytes=30, class_bytes={"ReLU": 1})
    assert offloaded((choose_device_map(model, "balanced", memory, workload=spared), 0))
    assert choose_device_map(model, "balanced", {**memory, 3: 100}, workload=spared) == {str(n): n for n in range(4)}


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="device_map='best': expected a mapping or one of 'auto', 'balanced'"):
        choose_device_map(nn.Linear(1, 1), "best")


def test_devices_that_got_nothing_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    logging.disable(logging.NOTSET)
    with caplog.at_level(logging.INFO, logger=device_map.__name__):
        infer_auto_device_map(nn.Sequential(nn.Linear(4, 4)), {"cpu": 10})
    assert "cpu: 80 bytes" in caplog.text


MAPS: list[dict[str, Any]] = [
    {},
    {"": 0},
    {"a": 0},
    {"a": 0, "b": 0},
    {"": 0, "a": 0},
    {"a": 0, "b.x": 1, "b.y": 1, "c.d.e": 1, "c.d.f": 1, "c.g": 0},
    {"a.b": 0, "b": 1},
    {"a.b.c": 0, "a.b.d": 0, "b": 1},
    {"a": 0, "a.b": 0, "b": 1},
    {"a": 1, "a.b": 0, "a.c": 0, "b": 1},
    {"a.b": 0, "a": 1, "a.c": 0, "ab": 1},
    {"a.b": "disk", "a.c": "disk", "ab.b": 1, "ab.c": 1},
]


@pytest.mark.parametrize("devices", MAPS)
@pytest.mark.parametrize("module_name", ["", "a", "b"])
def test_maps_are_cleaned_in_place_as_by_the_original(devices: dict[str, Any], module_name: str) -> None:
    own = dict(devices)
    assert clean_device_map(own, module_name) is own
    assert own == original_modeling.clean_device_map(dict(devices), module_name)


def test_a_map_that_leaves_something_out_is_refused_by_name() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    with pytest.raises(InvalidArgument, match=r"no device to 1\.weight, 1\.bias$"):
        check_device_map(model, {"0": "cpu"})
    with pytest.raises(InvalidArgument, match=r"0\.num_batches_tracked$"):
        check_device_map(
            model, {"1": 0, **{f"0.{name}": 0 for name in ("weight", "bias", "running_mean", "running_var")}}
        )


def test_names_that_the_model_lacks_are_warned_of_and_those_of_tensors_are_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_device_map(model, {"0.weight": 0, "0": "cpu"})
    with pytest.warns(UserWarning, match="device_map keys do not match any submodules in the model: nope; "):
        check_device_map(model, {"": 0, "nope": 0})


def test_sizes_with_shared_parameters_are_those_of_the_original() -> None:
    sizes = {"b": 10, "b.x.weight": 3, "b.y.weight": 4}
    module = nn.Linear(1, 1)
    arguments: Any = (["b.x.weight", "b.y.weight"], 100, sizes, [("a", module), ("b", module)])
    assert get_module_size_with_ties(*arguments) == original_modeling.get_module_size_with_ties(*arguments)
    assert get_module_size_with_ties([], 5, {}, []) == (5, [], [])
    assert get_module_size_with_ties(["b.w"], 5, {"b.w": 3}, [("b.w", module)])[:2] == (5, ["b.w"])
    with pytest.raises(InvalidArgument, match=r"'c\.weight' of tied_params"):
        get_module_size_with_ties(["c.weight"], 5, sizes, [("b", module)])
