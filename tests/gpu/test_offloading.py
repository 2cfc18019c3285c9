"""Models larger than what they may take of the GPU: the rest is in memory and on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_cpp import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate_cpp.placement.offloaded_modules import offload_hook
from accelerate_cpp.utils import compute_module_sizes, get_max_memory

WIDTH, LAYERS = 512, 6
LAYER_BYTES = 4 * WIDTH * WIDTH


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def row() -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, 3 * WIDTH).reshape(3, WIDTH)


@pytest.fixture
def expected(row: torch.Tensor) -> torch.Tensor:
    """What the model computes that is on the GPU as a whole."""
    return layers().cuda()(row.cuda()).cpu()


@pytest.mark.parametrize("window", [None, "2097152"], ids=["as needed", "ahead"])
@pytest.mark.parametrize("where", ["memory", "disk", "all three"])
def test_an_offloaded_model_computes_what_it_computes_on_the_gpu(
    where: str, window: str | None, row: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if window is not None:
        monkeypatch.setenv("ACCELERATE_CPP_OFFLOAD_WINDOW", window)
    if where == "memory":
        model: Any = cpu_offload(layers(), torch.device("cuda", 0))
    elif where == "disk":
        model = disk_offload(layers(), tmp_path, torch.device("cuda", 0))
    else:
        places = {"0": 0, "1": "cpu", "2": "disk", "3": 0, "4": "disk", "5": "cpu"}
        model = dispatch_model(layers(), places, offload_dir=tmp_path)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        assert torch.equal(model(row).cpu(), expected)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2097152 + LAYER_BYTES, "weights stay on the GPU"


def test_weights_are_copied_ahead_while_the_gpu_computes(
    row: Any, expected: Any, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_CPP_OFFLOAD_WINDOW", str(2 * LAYER_BYTES))
    model = cpu_offload(layers(), torch.device("cuda", 0))
    first = offload_hook(model[0])
    assert first is not None
    assert first._unit is not None
    engine = first._unit.engine
    value = row.cuda()
    for layer in model:  # in which order layers come, and what the first pass has to load
        value = layer(value)
        engine.await_idle()
    torch.cuda.synchronize()
    value = model[0](row.cuda())
    engine.await_idle()
    assert engine.bytes_ahead == 2 * LAYER_BYTES
    current = torch.cuda.current_stream()
    gate.close(current)
    value = model[1](value)
    engine.await_idle()
    assert engine.bytes_ahead == 2 * LAYER_BYTES, "the next layer is not copied while the GPU computes"
    for layer in list(model)[2:]:  # the host would wait for the gate where it copied a layer itself
        value = layer(value)
        engine.await_idle()
    assert not current.record_event().query()
    gate.open()
    assert torch.equal(value.cpu(), expected)


def test_a_checkpoint_is_loaded_to_the_places_of_a_map_that_fits(row: Any, expected: Any, tmp_path: Path) -> None:
    whole = layers()
    torch.save(whole.state_dict(), tmp_path / "weights.bin")
    with init_empty_weights():
        empty = layers()
    limits: dict[Any, Any] = {0: 2 * LAYER_BYTES, "cpu": 3 * LAYER_BYTES}
    places = infer_auto_device_map(empty, max_memory=limits)
    model = load_checkpoint_and_dispatch(
        empty, tmp_path / "weights.bin", device_map=places, offload_folder=tmp_path / "off"
    )
    assert {0, "cpu", "disk"} == set(places.values())
    on_gpu = [name for name, place in places.items() if place == 0]
    assert sum(compute_module_sizes(whole)[name] for name in on_gpu) <= 2 * LAYER_BYTES
    assert torch.equal(model(row).cpu(), expected)


def test_a_model_with_a_hook_is_on_the_gpu_until_the_next_one_runs(row: Any, expected: Any) -> None:
    first, hook = cpu_offload_with_hook(layers(), torch.device("cuda", 0))
    second, other = cpu_offload_with_hook(layers(), torch.device("cuda", 0), prev_module_hook=hook)
    assert torch.equal(first(row).cpu(), expected)
    assert next(first.parameters()).is_cuda
    assert torch.equal(second(row).cpu(), expected)
    assert not next(first.parameters()).is_cuda
    other.offload()
    assert not next(second.parameters()).is_cuda


def test_room_on_the_gpu_is_what_the_driver_says() -> None:
    free, total = torch.cuda.mem_get_info(0)
    found = get_max_memory()[0]
    assert total // 2 < found <= free


def test_quantized_layers_are_those_of_bitsandbytes() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    from accelerate_cpp.utils import BnbQuantizationConfig, load_and_quantize_model

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 32)).half()

    config = BnbQuantizationConfig(load_in_8bit=True, skip_modules=["2"], torch_dtype="fp16")
    quantized = load_and_quantize_model(model(), config)
    expected = model()
    for number in (0, 1):
        plain = expected[number]
        layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0)
        layer.load_state_dict(plain.state_dict())
        expected[number] = layer
    expected = expected.cuda()
    data = torch.randn(8, 64, device="cuda", dtype=torch.float16)
    assert [type(layer).__name__ for layer in quantized] == ["Linear8bitLt", "Linear8bitLt", "Linear"]
    torch.testing.assert_close(quantized(data), expected(data), rtol=0, atol=0)
