"""DeepSpeed is asked for by a run, and found or not."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from accelerate_cpp import Accelerator
from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.parallel.deepspeed import library
from accelerate_cpp.runtime import current
from accelerate_cpp.utils import DeepSpeedPlugin

pytestmark = pytest.mark.usefixtures("fresh_state")


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _variables_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it exports is gone afterwards."""
    for name in ("DS_ACCELERATOR", "LOCAL_RANK", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("asked", ["DeepSpeedPlugin", "ACCELERATE_USE_DEEPSPEED"])
def test_without_it_one_sentence_says_what_to_install(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_installed", lambda name, at_least: name != "deepspeed")
    plugin = DeepSpeedPlugin() if asked == "DeepSpeedPlugin" else None
    if plugin is None:
        monkeypatch.setenv(asked, "true")
    with pytest.raises(MissingLibrary, match=rf"^{asked}: training through DeepSpeed needs DeepSpeed .* pip install"):
        Accelerator(cpu=True, deepspeed_plugin=plugin)
    assert current.session is None


@pytest.mark.usefixtures("_group")
def test_it_computes_where_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    module = library.joined_library(torch.device("cpu"))
    assert module.__name__ == "deepspeed"
    assert module.ops.__compatible_ops__["deepspeed_shm_comm"] is False
    imported = library.importlib.import_module

    def elsewhere(name: str) -> Any:
        other = SimpleNamespace(device_name=lambda: "cuda")
        return SimpleNamespace(get_accelerator=lambda: other) if name == "deepspeed.accelerator" else imported(name)

    monkeypatch.setattr(library.importlib, "import_module", elsewhere)
    with pytest.raises(InvalidArgument, match="computes on 'cuda', but this process on 'cpu'; set DS_ACCELERATOR=cpu"):
        library.joined_library(torch.device("cpu"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"deepspeed_plugin": 7}, "deepspeed_plugin=7: expected a DeepSpeedPlugin, or a dict"),
        ({"deepspeed_plugins": {}}, "expected a DeepSpeedPlugin, or a dict"),
        ({"deepspeed_plugins": {"a": 7}}, "expected a DeepSpeedPlugin, or a dict"),
        ({"deepspeed_plugin": DeepSpeedPlugin(), "deepspeed_plugins": DeepSpeedPlugin()}, "are both given"),
    ],
    ids=["number", "nothing", "dict of numbers", "twice"],
)
def test_what_is_no_plugin_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Accelerator(cpu=True, **arguments)
    assert current.session is None


def test_deepspeed_and_fsdp_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(InvalidArgument, match="DeepSpeed and FSDP are both asked for"):
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin())
    assert current.session is None
