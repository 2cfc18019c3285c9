"""Each row of the table of devices, on a double of torch's module for it, and devices that packages bring."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import dataclasses as original

from accelerate_cpp.checkpoint.random_states import check_random_states, random_states, restore_random_states
from accelerate_cpp.data_loader import DataLoaderShard
from accelerate_cpp.devices import device as device_module
from accelerate_cpp.devices import selection
from accelerate_cpp.devices.device import Device
from accelerate_cpp.devices.memory import clear_device_cache, release_cache
from accelerate_cpp.devices.table import accelerators, kind_of
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.utils import set_seed, synchronize_rng_states

# The devices of torch_xla are no module of torch: tests/python/devices/test_xla.py has a double of that package.
ROWS = [kind.type for kind in accelerators() if kind.type != "xla"]
# As the original compares them in accelerate/state.py and accelerate/utils/random.py.
BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "mlu": "cncl", "musa": "mccl", "sdaa": "tccl", "hpu": "hccl"}
BACKENDS |= {"neuron": "neuron"}
KEYS_OF_THE_ORIGINAL = {f"torch_{name}_manual_seed" for name in ["cuda", "xpu", "mlu", "sdaa", "musa", "hpu", "neuron"]}


class Double:
    """What ``torch.<type>`` offers for a device, with two of them, and what was asked of it."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.index = 0
        self.states = [torch.tensor([number], dtype=torch.uint8) for number in (10, 11)]
        self.random = SimpleNamespace()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return self.index

    def set_device(self, index: int) -> None:
        self.index = index

    def get_device_name(self, index: int) -> str:
        return f"number {index}"

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 1000 + index, 5000

    def memory_allocated(self, index: int | None) -> int:
        return 70 + (self.index if index is None else index)

    def current_allocated_memory(self) -> int:
        return 70

    def empty_cache(self) -> None:
        self.told.append("empty_cache")

    def synchronize(self) -> None:
        self.told.append("synchronize")

    def manual_seed(self, seed: int) -> None:
        self.told.append(("seed", seed))

    manual_seed_all = manual_seed

    def get_rng_state(self) -> torch.Tensor:
        return self.states[self.index]

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.states[self.index] = state

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return list(self.states)

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        self.states = [*states, *self.states[len(states) :]]

    def Stream(self, device: torch.device) -> str:
        return f"stream on {device}"

    def is_bf16_supported(self) -> bool:
        return False

    def get_device_capability(self, device: object) -> tuple[int, int]:
        return 8, 0


def packages_of(kind: Device, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Installs the package that brings the type."""
    parts = (kind.package or "").split(".")
    for number in range(len(parts)) if kind.package else ():
        place = folder.joinpath(*parts[: number + 1])
        place.mkdir(parents=True, exist_ok=True)
        (place / "__init__.py").write_text("")
        name = ".".join(parts[: number + 1])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that what is imported is forgotten afterwards
        del sys.modules[name]
    if "habana_frameworks" in parts:
        experimental = ModuleType("habana_frameworks.torch.utils.experimental")
        vars(experimental).update(_get_device_type=lambda: 2, synDeviceType=SimpleNamespace(synDeviceGaudi=1))
        monkeypatch.setitem(sys.modules, experimental.__name__, experimental)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Device, Double]:
    """A kind of device that is there, on its double."""
    kind, double = kind_of(request.param), Double()
    packages_of(kind, monkeypatch, tmp_path)
    monkeypatch.setattr(torch, kind.type, double, raising=False)
    monkeypatch.setattr(selection, "accelerators", lambda: (kind,))  # and not what this machine has
    if kind.type == "mps":
        monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    return kind, double


def test_it_is_counted_and_numbered(row: tuple[Device, Double]) -> None:
    kind, double = row
    assert kind.is_available()
    assert kind.count() == (2 if kind.numbered else 1)
    kind.set_current(1)
    assert kind.current() == double.index == (1 if kind.numbered else 0)
    assert kind.is_initialized()
    assert kind.name_of(1)
    assert selection.available_devices() == [kind]
    assert kind_of(f"{kind.type}:1") is kind


def test_its_memory_is_told_and_given_back(row: tuple[Device, Double]) -> None:
    kind, double = row
    assert kind.free_bytes(1) == 1001 or kind.shares_memory_with_host
    assert kind.allocated_bytes(1) == (71 if kind.numbered else 70)
    clear_device_cache()
    release_cache(SimpleNamespace(type=kind.type))  # type: ignore[arg-type]
    assert double.told == ([] if kind.type == "hpu" else ["empty_cache"] * 2)
    kind.synchronize()
    assert double.told[-1] == "synchronize"


def test_its_generators_are_seeded_and_saved(row: tuple[Device, Double], monkeypatch: pytest.MonkeyPatch) -> None:
    kind, double = row
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # which seeds real devices, too
    set_seed(5)
    assert ("seed", 5) in double.told
    saved = random_states(0)
    assert f"torch_{kind.type}_manual_seed" in saved
    before = [state.clone() for state in kind.random_states()]
    kind.set_random_states([torch.tensor([99], dtype=torch.uint8)])
    assert kind.random_states()[0].item() == 99
    assert check_random_states(saved, "it") == []
    restore_random_states(saved)
    assert all(map(torch.equal, kind.random_states(), before))
    kind.set_random_state(torch.tensor([7], dtype=torch.uint8))
    assert kind.random_state().item() == 7
    synchronize_rng_states([kind.type])


def test_names_are_those_of_the_original(row: tuple[Device, Double]) -> None:
    kind, _ = row
    assert kind.distributed_type in [member.value for member in original.DistributedType]
    if kind.type not in ("npu", "mps"):  # whose states the original does not save
        assert kind.random_state_key in KEYS_OF_THE_ORIGINAL
    if not kind.one_process:
        assert kind.backend() == BACKENDS[kind.type]
    assert kind.grad_scaler(enabled=False)._device == kind.type


def test_copies_beside_computing_need_streams_and_pinned_memory(row: tuple[Device, Double]) -> None:
    kind, _ = row
    copies = kind.copy_stream(torch.device("cpu"))
    assert (copies is not None) is (kind.type != "mps")


def test_arithmetic_that_it_lacks_is_named(row: tuple[Device, Double], monkeypatch: pytest.MonkeyPatch) -> None:
    kind, _ = row
    device: Any = SimpleNamespace(index=1, type=kind.type)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: False)
    lacking = {name: kind.lacks(name, device) for name in ("fp16", "bf16", "fp8")}
    expected: dict[str, dict[str, str]] = {
        "cuda": {"bf16": "number 1 does not support bf16", "fp8": "capability 8.0, but fp8 needs 8.9"},
        "mps": {"bf16": "needs macOS 14"},
    }
    for name, text in lacking.items():
        wanted = expected.get(kind.type, {}).get(name)
        assert wanted in text if text is not None and wanted is not None else text is wanted


def test_a_gaudi_of_the_first_generation_has_no_fp16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kind = kind_of("hpu")
    packages_of(kind, monkeypatch, tmp_path)
    experimental: Any = sys.modules["habana_frameworks.torch.utils.experimental"]
    experimental._get_device_type = lambda: 1
    text = kind.lacks("fp16", torch.device("hpu", 0))
    assert text is not None
    assert "first generation" in text


def test_a_kind_that_cannot_be_counted_is_not_there(
    row: tuple[Device, Double], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, double = row
    if not kind.numbered:
        return  # there is one, or none

    def fail() -> int:
        raise RuntimeError("no driver")

    monkeypatch.setattr(double, "device_count", fail)
    assert kind.count() == 0
    assert selection.available_devices() == []


def test_without_its_package_torch_does_not_know_it() -> None:
    for kind in map(kind_of, ROWS):
        if kind.package is not None:
            assert kind.module() is None
            assert not kind.is_available()
            with pytest.raises(InvalidArgument, match=f"no device of type '{kind.type}'"):
                kind.synchronize()


@pytest.mark.parametrize("kind", [ImportError, OSError])
def test_a_package_that_does_not_load_is_told_of(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "torch_npu.py").write_text(f"raise {kind.__name__}('libascendcl.so: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert not kind_of("npu").is_available()
    assert "torch_npu is installed but cannot be imported, so there is no npu: libascendcl.so" in caplog.text


def test_the_cpu_is_a_row_too() -> None:
    cpu = kind_of(torch.device("cpu"))
    assert (cpu.count(), cpu.current(), cpu.random_states()[0].dtype) == (1, 0, torch.uint8)
    before = cpu.random_state()
    cpu.seed(3)
    first = torch.rand(2)
    cpu.set_random_states([before])
    assert torch.equal(cpu.random_state(), before)
    cpu.seed(3)
    assert torch.equal(torch.rand(2), first)
    assert cpu.copy_stream(torch.device("cpu")) is None
    assert cpu.free_bytes(0) > 0
    assert cpu.lacks("fp16", torch.device("cpu")) is None
    assert list(cpu.numa_nodes({})) == []
    cpu.set_current(0)
    cpu.set_random_state(before)
    cpu.empty_cache()
    cpu.synchronize()


def test_a_type_without_a_backend_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match=r"several processes on meta .*no backend"):
        kind_of("meta").backend()


def test_tf32_is_allowed_where_there_is_such_a_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.backends, "musa", SimpleNamespace(matmul=SimpleNamespace(allow_tf32=False)), raising=False
    )
    for kind in accelerators():
        if kind.type != "cuda":
            kind.allow_tf32()
    assert torch.backends.musa.matmul.allow_tf32 is True  # type: ignore[attr-defined]


BRINGS = """
from accelerate_cpp.devices.device import Device
DEVICE = Device(type="{type}", title="Vendor's device")
"""


def bring(folder: Path, module: str, value: str = "vendor_device:DEVICE", name: str = "privateuseone") -> None:
    """Installs a distribution with an entry point into ``folder``."""
    (folder / "vendor_device.py").write_text(module)
    info = folder / "vendor_device-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor-device\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[accelerate_cpp.devices]\n{name} = {value}\n")


def told(folder: Path) -> str:
    """What a process says of the devices when the packages in ``folder`` are installed."""
    program = """
from accelerate_cpp.devices.table import accelerators, kind_of
from accelerate_cpp.errors import InvalidArgument
try:
    print(accelerators()[0].title, "|", kind_of("privateuseone:0").title, "|", len(accelerators()))
except InvalidArgument as error:
    print(error)
"""
    environment = {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_a_package_brings_a_device(tmp_path: Path) -> None:
    bring(tmp_path, BRINGS.format(type="privateuseone"))
    assert told(tmp_path) == f"Vendor's device | Vendor's device | {len(ROWS) + 2}"


def test_a_package_replaces_a_row(tmp_path: Path) -> None:
    bring(tmp_path, BRINGS.format(type="npu"), name="npu")
    assert told(tmp_path) == f"Vendor's device | privateuseone | {len(ROWS) + 1}"


@pytest.mark.parametrize(
    ("module", "value", "message"),
    [
        ("DEVICE = 5", "vendor_device:DEVICE", "of that type, found int"),
        (BRINGS.format(type="other"), "vendor_device:DEVICE", "of that type, found one of type 'other'"),
        ("raise OSError('no driver')", "vendor_device:DEVICE", "cannot be loaded (OSError: no driver)"),
        ("", "vendor_device:DEVICE", "cannot be loaded (AttributeError"),
    ],
)
def test_an_entry_that_brings_no_device_is_named(module: str, value: str, message: str, tmp_path: Path) -> None:
    bring(tmp_path, module, value)
    said = told(tmp_path)
    assert "the package vendor-device brings the device 'privateuseone' (accelerate_cpp.devices: vendor_dev" in said
    assert message in said
    assert "repair or uninstall that package" in said


def test_apples_fallback_is_switched_on_unless_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "0")
    kind_of("mps").prepare_use()
    assert os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] == "0"
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "")
    kind_of("mps").prepare_use()
    assert os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] == "1"


def test_packages_are_found_with_all_that_they_are_in() -> None:
    assert device_module._is_installed("torch")
    assert not device_module._is_installed("no_such_package.with_parts")


def test_a_batch_of_float64_is_refused_where_there_is_none() -> None:
    mps = kind_of("mps")
    mps.require_computable({"a": [torch.ones(2), "text"], "b": torch.ones(2, dtype=torch.int64)})
    wrong = {"a": torch.ones(3, 2, dtype=torch.float64)}
    with pytest.raises(InvalidArgument, match=r"shape \(3, 2\) and torch.float64, which Apple GPU .*\.float\(\)"):
        mps.require_computable(wrong)
    kind_of("cuda").require_computable(wrong)
    loader = DataLoaderShard([torch.ones(2, dtype=torch.float64)], torch.device("mps"), batch_size=1)
    with pytest.raises(InvalidArgument, match=r"torch\.float64"):
        next(iter(loader))
