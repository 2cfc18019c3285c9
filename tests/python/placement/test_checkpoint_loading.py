"""Loading checkpoints into models."""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate.utils as original
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate_cpp import load_checkpoint_and_dispatch
from accelerate_cpp.errors import CheckpointError, InvalidArgument, SystemFailure
from accelerate_cpp.placement.checkpoint_loading import load_checkpoint_in_model, load_state_dict
from accelerate_cpp.placement.empty_init import init_empty_weights
from accelerate_cpp.placement.offload import OffloadedWeightsLoader


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.batchnorm, self.linear2 = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.batchnorm(self.linear1(x)))


def empty() -> Net:
    with init_empty_weights():
        return Net().eval()


@pytest.fixture
def saved(tmp_path: Path) -> Net:
    """A model whose weights are in ``model.safetensors`` and ``weights.bin`` of the test's folder."""
    model = Net().eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.save(model.state_dict(), tmp_path / "weights.bin")
    return model


X = torch.randn(2, 3)
HALF_ON_DISK = {"linear1": "cpu", "batchnorm": "disk", "linear2": "disk"}


@pytest.mark.parametrize("name", ["", "model.safetensors", "weights.bin"])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"linear1": "cpu", "batchnorm": "cpu", "linear2": "cpu"}])
@pytest.mark.parametrize("make", [empty, Net])
def test_the_model_computes_what_the_saved_one_does(
    saved: Net, tmp_path: Path, name: str, device_map: Any, make: Any
) -> None:
    model = make().eval()
    load_checkpoint_in_model(model, tmp_path / name, device_map=device_map, strict=True)
    assert torch.equal(model(X), saved(X))


OPTIONS: list[dict[str, Any]] = [
    {"device_map": {"": "cpu"}},
    {"device_map": {"": "cpu"}, "dtype": "float16"},
    {"device_map": {"": "cpu"}, "dtype": "torch.bfloat16", "keep_in_fp32_modules": ["linear1"]},
    {"device_map": {"": "cpu"}, "dtype": torch.float16, "keep_in_fp32_modules": ["linear1"]},
    {"device_map": HALF_ON_DISK},
    {"device_map": HALF_ON_DISK, "offload_buffers": True, "offload_state_dict": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_tensors_are_where_the_original_puts_them(saved: Net, tmp_path: Path, options: dict[str, Any]) -> None:
    models = []
    for load, folder in ((load_checkpoint_in_model, "ours"), (original.load_checkpoint_in_model, "theirs")):
        model = empty()
        load(model, str(tmp_path), offload_folder=str(tmp_path / folder), **options)  # type: ignore[operator]
        models.append({name: (tensor.device, tensor.dtype) for name, tensor in named(model)})
    assert models[0] == models[1]
    if "disk" in options["device_map"].values():
        ours, theirs = (original.OffloadedWeightsLoader(save_folder=tmp_path / name) for name in ("ours", "theirs"))
        assert {name: ours[name].tolist() for name in ours} == {name: theirs[name].tolist() for name in theirs}


def named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def test_weights_on_the_cpu_are_mapped_and_not_copied(saved: Net, tmp_path: Path) -> None:
    model = empty()
    load_checkpoint_in_model(model, tmp_path, device_map={"": "cpu"})
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "model.safetensors" in line]
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in mapped]
    assert all(any(begin <= tensor.data_ptr() < end for begin, end in spans) for _, tensor in named(model))


def test_what_is_missing_or_too_much_is_logged(saved: Net, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = dict(saved.state_dict()) | {"zz": torch.ones(1)}
    del content["linear1.bias"]
    save_file(content, tmp_path / "other.safetensors")
    model = empty()
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(model, tmp_path / "other.safetensors", device_map={"": "cpu"})
    assert "were not used when initializing Net, which has no place for them: zz" in caplog.text
    assert "still without values: linear1.bias" in caplog.text
    with pytest.raises(ValueError, match=r"lacks linear1\.bias; its additional entries: zz"):
        load_checkpoint_in_model(empty(), tmp_path / "other.safetensors", strict=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device_map": {"": "disk"}}, InvalidArgument, "pass an offload_folder"),
        ({"device_map": {"linear1": "cpu"}}, InvalidArgument, "no device to batchnorm.weight"),
        ({"offload_8bit_bnb": True}, InvalidArgument, "layers of bitsandbytes are not offloaded"),
        ({"dtype": "nn"}, InvalidArgument, "dtype='nn': expected a torch.dtype"),
    ],
)
def test_what_cannot_work_is_refused(
    saved: Net, tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = empty()
    with pytest.raises(error, match=message):
        load_checkpoint_in_model(model, tmp_path, **options)
    assert {tensor.device.type for tensor in model.parameters()} == {"meta"}


def test_a_truncated_shard_is_named_and_nothing_is_loaded(saved: Net, tmp_path: Path) -> None:
    state = dict(saved.state_dict())
    folder = tmp_path / "shards"
    folder.mkdir()
    first = {name: tensor for name, tensor in state.items() if name.startswith("linear1")}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    rest = folder / "model-00002-of-00002.safetensors"
    save_file({name: tensor for name, tensor in state.items() if name not in first}, rest)
    where = {name: f"model-0000{1 if name in first else 2}-of-00002.safetensors" for name in state}
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {str(where).replace(chr(39), chr(34))}}}')
    model = empty()
    load_checkpoint_in_model(model, folder, device_map={"": "cpu"}, strict=True)
    assert torch.equal(model(X), saved(X))
    rest.write_bytes(rest.read_bytes()[:-3])
    model = empty()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: expected tensors .* cut short"):
        load_checkpoint_in_model(model, folder, device_map={"": "cpu"})
    assert {tensor.device.type for tensor in model.parameters()} == {"meta"}


def test_an_index_that_leads_out_of_its_folder_is_refused_and_nothing_is_loaded(saved: Net, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    save_file(saved.state_dict(), tmp_path / "elsewhere.safetensors")
    where = dict.fromkeys(saved.state_dict(), "../elsewhere.safetensors")
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for load in (load_checkpoint_in_model, load_checkpoint_and_dispatch):
        model = empty()
        with pytest.raises(
            CheckpointError, match=r"index\.json names '\.\./elsewhere\.safetensors': .* points outside"
        ):
            load(model, tmp_path / "folder", device_map={"": "cpu"})
        assert {tensor.device.type for tensor in model.parameters()} == {"meta"}


def test_a_full_disk_leaves_neither_files_nor_half_a_model(tmp_path: Path) -> None:
    big = nn.Sequential(nn.Linear(4, 4), nn.Linear(600, 600))
    save_file(big.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(600, 600))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(SystemFailure, match=r"while writing 1440000 bytes to .*1\.weight\.dat"):
            load_checkpoint_in_model(
                model, tmp_path, device_map={"0": "cpu", "1": "disk"}, offload_folder=tmp_path / "offload"
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "offload").iterdir()) == []
    assert {tensor.device.type for tensor in model.parameters()} == {"meta"}


def test_a_machine_without_room_is_told_of_the_tensor(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(8192, 8192, dtype=torch.int8)}, tmp_path / "w.safetensors")
    script = (
        "import resource, sys, torch\n"
        "from accelerate_cpp.utils import load_checkpoint_in_model\n"
        "model = torch.nn.Linear(8192, 8192, bias=False, device='meta')\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (160 << 20), -1))\n"
        "try:\n"
        "    load_checkpoint_in_model(model, sys.argv[1], device_map={'': 'cpu'})\n"
        "except torch.OutOfMemoryError as error:\n"
        "    print(error, model.weight.device.type)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "w.safetensors")], capture_output=True, text=True, check=True
    )
    assert "no room on cpu for 'weight' of (8192, 8192), 67108864 bytes" in done.stdout
    assert done.stdout.endswith("meta\n")


def test_parts_of_a_shared_weight_on_different_devices_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    save_file({"0.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    load_checkpoint_in_model(model, tmp_path, device_map={"0": "cpu", "1": "disk"}, offload_folder=tmp_path / "o")
    assert "shared parameter on different devices" in caplog.text
    assert OffloadedWeightsLoader(save_folder=tmp_path / "o")["1.weight"].tolist() == [[1, 1], [1, 1]]
    assert model[0].weight.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("make", [empty, Net])
def test_models_that_convert_old_checkpoints_themselves_do_so(saved: Net, tmp_path: Path, make: Any) -> None:
    old = {f"old_{name}": tensor for name, tensor in saved.state_dict().items()}
    save_file(old, tmp_path / "old.safetensors")
    model = make().eval()

    def rename(state: dict[str, Any], *_others: Any) -> None:
        for name in list(state):
            state[name.removeprefix("old_")] = state.pop(name)

    model._register_load_state_dict_pre_hook(rename)
    load_checkpoint_in_model(model, tmp_path / "old.safetensors", strict=True)
    assert torch.equal(model(X), saved(X))


@pytest.mark.parametrize("broadcast", [pytest.param(False, marks=pytest.mark.long), True])
def test_models_that_are_spread_over_processes_are_loaded_by_torch(saved: Net, tmp_path: Path, broadcast: bool) -> None:
    script = (
        "import sys, torch, torch.distributed as dist\n"
        "from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh\n"
        "from accelerate_cpp.utils import load_checkpoint_in_model\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "mesh = init_device_mesh('cpu', (1,))\n"
        "model = torch.nn.Linear(3, 4)\n"
        "for name, parameter in list(model.named_parameters()):\n"
        "    spread = distribute_tensor(torch.zeros_like(parameter), mesh, [Replicate()])\n"
        "    setattr(model, name, torch.nn.Parameter(spread))\n"
        f"load_checkpoint_in_model(model, sys.argv[1], strict=True, broadcast_from_rank0={broadcast})\n"
        "print(type(model.weight.data).__name__, model.weight.to_local().sum().item())\n"
        "dist.destroy_process_group()\n"
    )
    save_file(saved.linear1.state_dict(), tmp_path / "linear.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "linear.safetensors")], capture_output=True, text=True, check=True
    )
    name, total = done.stdout.split()
    assert name == "DTensor"
    assert float(total) == pytest.approx(saved.linear1.weight.sum().item(), abs=1e-5)


def test_a_file_is_a_state_dict_on_the_devices_of_a_map(saved: Net, tmp_path: Path) -> None:
    for name in ("model.safetensors", "weights.bin"):
        found = load_state_dict(tmp_path / name, {"linear1": "meta", "linear2": "disk"})
        assert {key: value.device.type for key, value in found.items() if "linear" in key} == {
            "linear1.weight": "meta",
            "linear1.bias": "meta",
            "linear2.weight": "cpu",
            "linear2.bias": "cpu",
        }
        assert torch.equal(load_state_dict(tmp_path / name)["linear1.weight"], saved.linear1.weight)
    with pytest.raises(CheckpointError, match="nope"):
        load_state_dict(tmp_path / "nope.safetensors")


def test_a_device_without_room_has_nothing_of_a_checkpoint_afterwards(on_the_double: Callable[..., None]) -> None:
    on_the_double(
        """
        from safetensors.torch import save_file
        from accelerate_cpp import init_empty_weights, load_checkpoint_and_dispatch
        save_file(layers().state_dict(), "model.safetensors")
        with init_empty_weights():
            model = layers()
        double.set_room(3 * LAYER)
        try:
            load_checkpoint_and_dispatch(model, "model.safetensors", device_map={"": "standin:0"})
        except torch.OutOfMemoryError as error:
            assert "no room on standin:0 for '3.weight' of (64, 64), 16384 bytes" in str(error), error
        else:
            raise AssertionError("there was no room")
        assert all(parameter.device.type == "meta" for parameter in model.parameters())
        assert double.bytes_in_use() == 0
        double.set_room(7 * LAYER)
        load_checkpoint_and_dispatch(model, "model.safetensors", device_map={"": "standin:0"})
        assert torch.equal(model(row.to("standin:0")).cpu(), expected)
        """
    )
