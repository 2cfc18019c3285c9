"""Which libraries and devices there are: the answers of the original, for installations made up here."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import accelerate.utils.imports as original
import pytest
import torch

from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.utils import imports

# Distribution → its module.
LIBRARIES = {
    name: name
    for name in (
        *("aim", "amdsmi", "bitsandbytes", "boto3", "clearml", "comet_ml", "datasets", "deepspeed", "dvclive"),
        *("import_timer", "lomo_optim", "matplotlib", "mlflow", "pandas", "peft", "pynvml", "pytest", "rich"),
        *("sagemaker", "schedulefree", "swanlab", "tensorboard", "timm", "torchao", "torchdata", "torchvision"),
        *("tqdm", "trackio", "transformers", "triton", "wandb"),
    )
} | {"ms-amp": "msamp", "transformer-engine": "transformer_engine", "megatron-core": "megatron"}
OTHER_NAMES = {"nvidia-ml-py": "pynvml", "mlflow-skinny": "mlflow", "tensorboardX": "tensorboardX"}
# The original answers about torch_xla when it is imported, and cannot be asked about one that comes later.
SAME = sorted(
    name
    for name in dir(original)
    if name.startswith("is_") and inspect.signature(getattr(original, name)).parameters.keys() <= {"min_version"}
)
SAME = [name for name in SAME if hasattr(imports, name) and name != "is_transformer_engine_mxfp8_available"]
EXTENSIONS = {
    "npu": "torch_npu",
    "mlu": "torch_mlu",
    "sdaa": "torch_sdaa",
    "musa": "torch_musa",
    "neuron": "torch_neuronx",
    "hpu": "habana_frameworks.torch",
}

Install = Callable[[dict[str, str], str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts distributions of a version before those that are installed; no library counts that is installed besides."""

    def put(libraries: dict[str, str], version: str) -> None:
        for distribution, module in libraries.items():
            (tmp_path / module).mkdir(exist_ok=True)
            (tmp_path / module / "__init__.py").write_text("features = {'multi_backend'}\n")
            if version:
                metadata = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info" / "METADATA"
                metadata.parent.mkdir()
                metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        importlib.invalidate_caches()

    for module in {*LIBRARIES.values(), *OTHER_NAMES.values()}:
        monkeypatch.setitem(sys.modules, module, None)  # so that what is imported here goes again
        monkeypatch.delitem(sys.modules, module)
    torch_path = str(Path(torch.__file__).parents[1])
    standard = [entry for entry in sys.path if "site-packages" not in entry]
    only_torch = tmp_path / "torch only"
    only_torch.mkdir()
    for entry in Path(torch_path).glob("torch*"):
        if entry.name == "torch" or entry.name.startswith("torch-"):
            (only_torch / entry.name).symlink_to(entry)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(only_torch), *standard])
    importlib.invalidate_caches()
    return put


def answers(module: ModuleType) -> dict[str, bool]:
    return {name: bool(getattr(module, name)()) for name in SAME}


@pytest.mark.parametrize("version", ["99.0", "0.5.0", "0.0.1", ""])
def test_answers_are_those_of_the_original(install: Install, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "1")
    install(LIBRARIES, version)
    assert len(SAME) > 45
    assert answers(imports) == answers(original)
    assert imports.is_wandb_available() is bool(version)


@pytest.mark.parametrize(("distribution", "module"), OTHER_NAMES.items())
def test_a_library_may_come_under_another_name(install: Install, distribution: str, module: str) -> None:
    install({distribution: module}, "1.0")
    found = {name for name, answer in answers(imports).items() if answer}
    assert found == {name for name, answer in answers(original).items() if answer}
    assert found & {"is_pynvml_available", "is_mlflow_available", "is_tensorboard_available"}


def test_no_library_is_imported_to_find_it(install: Install) -> None:
    install(LIBRARIES, "99.0")
    for name in SAME:
        if name != "is_bitsandbytes_multi_backend_available":
            getattr(imports, name)()
    assert not sys.modules.keys() & set(LIBRARIES.values()) - {"pytest"}


def test_a_library_that_is_installed_later_counts(install: Install) -> None:
    assert imports.is_wandb_available() is False
    install({"wandb": "wandb"}, "1.0")
    assert imports.is_wandb_available() is True


def test_a_module_that_was_made_up_counts_only_with_its_distribution(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))  # has no spec
    assert imports.is_wandb_available() is False
    install({"wandb": "wandb"}, "1.0")
    assert imports.is_wandb_available() is True
    monkeypatch.setitem(sys.modules, "wandb", None)  # as tests forbid an import
    assert imports.is_wandb_available() is False


@pytest.mark.parametrize(("version", "counts"), [(None, True), ("0.40", True), ("0.45.0", True), ("0.46", False)])
def test_bitsandbytes_may_have_to_be_new_enough(install: Install, version: str | None, counts: bool) -> None:
    install({"bitsandbytes": "bitsandbytes"}, "0.45.0")
    assert imports.is_bnb_available(version) is counts
    assert bool(original.is_bnb_available(version)) is counts
    assert imports.is_bitsandbytes_multi_backend_available() is True


@pytest.mark.parametrize(
    ("switch", "version", "counts"), [("true", "0.9", True), ("0", "0.9", False), ("1", "0.7", False)]
)
def test_megatron_counts_when_it_is_switched_on_new_enough_and_trains(
    install: Install, monkeypatch: pytest.MonkeyPatch, switch: str, version: str, counts: bool
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", switch)
    install({"megatron-core": "megatron"}, version)
    assert imports.is_megatron_lm_available() is False
    for name in ("megatron", "megatron.training"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    assert imports.is_megatron_lm_available() is counts


@pytest.mark.parametrize("supported", [True, False])
def test_blocks_in_fp8_are_asked_of_transformer_engine(
    install: Install, monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    assert imports.is_transformer_engine_mxfp8_available() is False
    install({"transformer-engine": "transformer_engine"}, "2.9")
    for name in ("transformer_engine.pytorch", "transformer_engine.pytorch.fp8"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(check_mxfp8_support=lambda: (supported, "why")))
    assert imports.is_transformer_engine_mxfp8_available() is supported


@pytest.mark.parametrize(("text", "counts"), [("1", True), ("true", True), ("", False), ("no", False)])
def test_rich_counts_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, text: str, counts: bool) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", text)
    assert imports.is_rich_available() is counts


@pytest.mark.parametrize("name", ["deepspeed", "torchao"])
def test_a_function_that_needs_a_library_refuses_without_it(install: Install, name: str) -> None:
    @getattr(imports, f"{name}_required")
    def train(first: int, *, second: int) -> int:
        """Its own docstring."""
        return first + second

    with pytest.raises(MissingLibrary, match=rf"train needs (DeepSpeed|torchao).*pip install {name}"):
        train(1, second=2)
    install({name: name}, "99.0")
    assert train(1, second=2) == 3
    assert (train.__name__, train.__doc__) == ("train", "Its own docstring.")


# -------------------------------------------------------------------------------------------------------------- devices


class Devices(SimpleNamespace):
    """What a vendor adds to torch: ``torch.npu`` and the like."""

    def __init__(self, available: bool = True, count: int | None = 4) -> None:
        def device_count() -> int:
            if count is None:
                raise RuntimeError("the driver does not answer")
            return count

        super().__init__(is_available=lambda: available, device_count=device_count)


CACHED = [name for name in dir(imports) if hasattr(getattr(imports, name), "cache_clear")]


def forget() -> None:
    for name in CACHED:
        for module in (imports, original):
            if hasattr(getattr(module, name, None), "cache_clear"):
                getattr(module, name).cache_clear()


@pytest.fixture
def extend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Any], None]]:
    """Installs the extension of a kind of device, and puts its module into torch."""

    def put(kind: str, devices: Any) -> None:
        forget()
        parts = EXTENSIONS[kind].split(".")
        for depth in range(len(parts)):
            name = ".".join(parts[: depth + 1])
            module: Any = ModuleType(name)
            module.__spec__, module.__path__ = ModuleSpec(name, None), []
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(torch, kind, devices, raising=False)

    yield put
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("devices", [Devices(), Devices(available=False)], ids=["present", "absent"])
@pytest.mark.parametrize("kind", EXTENSIONS)
def test_devices_of_other_vendors_count_as_in_the_original(
    extend: Callable[[str, Any], None], kind: str, devices: Devices
) -> None:
    name, argument = f"is_{kind}_available", "init_hccl" if kind == "hpu" else "check_device"
    assert getattr(imports, name)() is False
    extend(kind, devices)
    assert getattr(imports, name)() is getattr(original, name)() is devices.is_available()
    if kind != "hpu":
        assert getattr(imports, name)(**{argument: True}) is devices.is_available()
    assert imports.available_device_type() == (kind if devices.is_available() else "cpu")


@pytest.mark.parametrize("kind", sorted(EXTENSIONS.keys() - {"hpu"}))
def test_devices_that_cannot_be_counted_are_none_when_asked_to_check(
    extend: Callable[[str, Any], None], kind: str
) -> None:
    extend(kind, Devices(count=None))
    probe = getattr(imports, f"is_{kind}_available")
    assert (probe(), probe(check_device=True)) == (True, False)
    extend(kind, Devices(count=0))
    assert probe(check_device=True) is False


def test_an_extension_that_cannot_be_imported_is_told_and_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    assert imports.is_npu_available() is False
    assert "torch_npu is installed but cannot be imported, so there is no npu: libhccl.so" in caplog.text
    forget()


def test_collectives_of_gaudi_are_loaded_when_asked(
    extend: Callable[[str, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    extend("hpu", Devices())
    loaded: list[str] = []
    import_module = importlib.import_module
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name: loaded.append(name) if name.endswith("hccl") else import_module(name),
    )
    assert imports.is_hpu_available() is True
    assert loaded == []
    assert imports.is_hpu_available(init_hccl=True) is True
    assert loaded == ["habana_frameworks.torch.distributed.hccl"]


@pytest.mark.parametrize(("generation", "has_fp16"), [(1, False), (2, True)])
def test_the_first_gaudi_has_no_fp16(
    extend: Callable[[str, Any], None], monkeypatch: pytest.MonkeyPatch, generation: int, has_fp16: bool
) -> None:
    assert (imports.is_habana_gaudi1(), imports.is_fp16_available()) == (False, True)
    extend("hpu", Devices())
    experimental = SimpleNamespace(_get_device_type=lambda: generation, synDeviceType=SimpleNamespace(synDeviceGaudi=1))
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch.utils.experimental", experimental)
    assert (imports.is_habana_gaudi1(), imports.is_fp16_available()) == (not has_fp16, has_fp16)


@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize("hip", [None, "6.0"])
def test_gpus_of_cuda_and_rocm_count_without_initialising_the_driver(
    monkeypatch: pytest.MonkeyPatch, available: bool, hip: str | None
) -> None:
    asked: list[str | None] = []

    def is_available() -> bool:
        import os

        asked.append(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))
        return available

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(available))
    monkeypatch.setattr(torch.version, "hip", hip)
    assert imports.is_cuda_available() is available
    assert imports.is_rocm_available() is (available and hip is not None)
    assert set(asked) == {"1"}
    assert imports.available_device_type() == ("cuda" if available else "cpu")


@pytest.mark.parametrize(("count", "checked"), [(2, True), (0, False), (None, False)])
def test_an_intel_gpu_counts(monkeypatch: pytest.MonkeyPatch, count: int | None, checked: bool) -> None:
    forget()
    devices = Devices(count=count)
    for name in ("is_available", "device_count"):
        monkeypatch.setattr(torch.xpu, name, getattr(devices, name))
    assert (imports.is_xpu_available(), imports.is_xpu_available(check_device=True)) == (True, checked)
    forget()


@pytest.mark.parametrize("macos_14", [True, False])
def test_a_mac_counts_and_has_bf16_since_macos_14(monkeypatch: pytest.MonkeyPatch, macos_14: bool) -> None:
    mps = torch.backends.mps
    assert imports.is_mps_available() is False
    monkeypatch.setattr(mps, "is_available", lambda: True)
    assert imports.is_mps_available() is False
    monkeypatch.setattr(mps, "is_built", lambda: True)
    monkeypatch.setattr(mps, "is_macos_or_newer", lambda *version: macos_14 and version == (14, 0))
    assert (imports.is_mps_available(), imports.is_mps_available("99.0")) == (True, False)
    assert imports.is_bf16_available() is macos_14


@pytest.mark.parametrize("supported", [True, False])
def test_gpus_are_asked_whether_they_have_bf16(monkeypatch: pytest.MonkeyPatch, supported: bool) -> None:
    assert imports.is_bf16_available() is True  # the CPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    assert imports.is_bf16_available() is supported


@pytest.mark.parametrize(
    ("kind", "is_tpu", "is_gpu"), [("TPU", True, False), ("CUDA", False, True), ("CPU", False, False)]
)
def test_torch_xla_counts_by_what_it_runs_on_unless_it_is_switched_off(
    install: Install, monkeypatch: pytest.MonkeyPatch, kind: str, is_tpu: bool, is_gpu: bool
) -> None:
    forget()
    assert imports.is_torch_xla_available() is False
    forget()
    install({"torch_xla": "torch_xla"}, "2.7")
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", SimpleNamespace(device_type=lambda: kind))
    assert imports.is_torch_xla_available() is True
    assert imports.is_torch_xla_available(check_is_tpu=True) is is_tpu
    assert imports.is_torch_xla_available(check_is_gpu=True) is is_gpu
    assert imports.available_device_type() == "xla"
    assert imports.is_bf16_available(ignore_tpu=True) is not is_tpu
    with pytest.raises(InvalidArgument, match="exclude each other"):
        imports.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)
    forget()
    monkeypatch.setenv("USE_TORCH_XLA", "0")
    assert imports.is_torch_xla_available() is False
    forget()


def test_collectives_of_intel_gpus_are_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for available in (True, False):
        monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda answer=available: answer, raising=False)
        assert imports.is_xccl_available() is available


def test_importing_the_probes_does_not_load_torch() -> None:
    import subprocess

    script = "import sys, accelerate_cpp.utils.imports as i; i.is_wandb_available(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False"]
