"""What SECURITY.md promises, one test for each; the other promises have files of their own:

- the folder of a checkpoint: ``test_outside_files.py``; secrets: ``test_secrets.py``; sockets and shared memory, other
  users, and the ports of a launch: ``test_strangers.py``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate_cpp import Accelerator
from accelerate_cpp.checkpoint import manifest
from accelerate_cpp.config import file as config_file
from accelerate_cpp.errors import AccelerateError, CheckpointError
from accelerate_cpp.utils import DataLoaderConfiguration, load, merge_fsdp_weights
from make_seeds import calling

ROOT = Path(__file__).resolve().parents[2]
Saved = tuple[Accelerator, Path]


class Registered:
    """An object of the user's."""

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Calls:
    """A value whose pickle makes a folder when it is read without restrictions."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def prepared(**options: Any) -> Accelerator:
    """An accelerator with one of everything whose state is in a file of its own."""
    loaders = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=loaders, **options)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(range(4))  # type: ignore[arg-type]
    accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), loader)
    return accelerator


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """An accelerator, and a checkpoint of it without checksums, as the original writes them."""
    accelerator = prepared(mixed_precision="fp16")
    accelerator.save_state(tmp_path / "checkpoint", safe_serialization=False)
    (tmp_path / "checkpoint" / manifest.MANIFEST_NAME).unlink()
    return accelerator, tmp_path / "checkpoint"


@pytest.mark.parametrize(
    "name",
    [
        *("pytorch_model.bin", "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "scaler.pt"),
        "dl_state_dict.bin",
    ],
)
def test_a_pickle_that_needs_more_than_tensors_and_plain_values_is_refused(saved: Saved, name: str) -> None:
    accelerator, folder = saved
    called = folder.parent / "called"
    assert (folder / name).is_file()
    torch.save({"state": Calls(called)}, folder / name)
    with pytest.raises(
        CheckpointError, match=rf"{name}: expected .* would call functions that the file names: .*mkdir"
    ):
        accelerator.load_state(folder)
    assert not called.exists()


def test_exception_one_registered_objects_may_execute_code(tmp_path: Path) -> None:
    accelerator = prepared()
    accelerator.register_for_checkpointing(Registered())
    accelerator.save_state(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / manifest.MANIFEST_NAME).unlink()
    torch.save(Calls(tmp_path / "called"), tmp_path / "checkpoint" / "custom_checkpoint_0.pkl")
    accelerator.load_state(tmp_path / "checkpoint")
    assert (tmp_path / "called").is_dir()


def test_exception_two_a_program_may_ask_for_it(saved: Saved) -> None:
    accelerator, folder = saved
    called = folder.parent / "called"
    state = torch.load(folder / "optimizer.bin")
    torch.save({**state, "more": Calls(called)}, folder / "optimizer.bin")
    with pytest.raises(CheckpointError):
        load(folder / "optimizer.bin")
    with pytest.raises(CheckpointError):
        accelerator.load_state(folder)
    assert not called.exists()
    load(folder / "optimizer.bin", weights_only=False)
    assert called.is_dir()
    called.rmdir()
    accelerator.load_state(folder, load_kwargs={"weights_only": False})
    assert called.is_dir()


def test_exception_three_merging_reads_the_index_of_shards_as_a_pickle(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / ".metadata").write_bytes(pickle.dumps(Calls(tmp_path / "called")))
    with pytest.raises(CheckpointError):
        merge_fsdp_weights(tmp_path / "shards", tmp_path / "out")
    assert (tmp_path / "called").is_dir()


def test_loading_a_state_in_shards_is_no_exception(saved: Saved) -> None:
    accelerator, folder = saved
    (folder / "pytorch_model_fsdp_0").mkdir()
    (folder / "pytorch_model_fsdp_0" / ".metadata").write_bytes(b"\x80\x02" + calling("os", "mkdir", "called"))
    with pytest.raises(CheckpointError, match=r"it names (os|posix)\.mkdir, which no index contains"):
        accelerator.load_state(folder)
    assert not Path("called").exists()


def test_checksums_detect_damage_and_no_tampering(tmp_path: Path) -> None:
    accelerator, folder = prepared(), tmp_path / "checkpoint"
    accelerator.save_state(folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(AccelerateError, match="checksum"):
        accelerator.load_state(folder)
    known = manifest.read_manifest(folder)
    assert known is not None
    known.files["model.safetensors"] = manifest.record_of(folder / "model.safetensors")
    known.write(folder)
    accelerator.load_state(folder)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_configuration_files_are_data(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"config.{suffix}"
    path.write_text(f"!!python/object/apply:os.mkdir [{tmp_path / 'called'}]")
    with pytest.raises(AccelerateError, match="cannot be read as"):
        config_file.load(path)
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    ("told", "loads"),
    [({}, False), ({"ACCELERATE_CPP_ALIAS": "1"}, True), ({"ACCELERATE_CPP_ERROR_REPORT": "5"}, False)],
)
def test_the_start_of_python_does_nothing_unless_told(tmp_path: Path, told: dict[str, str], loads: bool) -> None:
    assert Path(sysconfig.get_path("purelib"), "accelerate_cpp_start.pth").is_file()
    script = "import json, sys; print(json.dumps([sorted(sys.modules), sys.excepthook is sys.__excepthook__]))"
    environ = {name: text for name, text in os.environ.items() if not name.startswith("ACCELERATE")}
    found = subprocess.run(
        [sys.executable, "-c", script], env=environ | told, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    modules, has_usual_hook = json.loads(found.stdout)
    assert any(name.partition(".")[0] == "accelerate_cpp" for name in modules) == loads
    assert has_usual_hook == ("ACCELERATE_CPP_ERROR_REPORT" not in told)


OWN_MODEL = """
import os
import torch
from transformers import PretrainedConfig, PreTrainedModel

open(os.environ["MARKER"], "w").close()

class OwnConfig(PretrainedConfig):
    model_type = "own"

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(4, 4)
"""
ESTIMATES = """
import os, sys
from accelerate_cpp.commands.estimate import estimate_command_parser
from accelerate_cpp.errors import AccelerateError
from accelerate_cpp.placement.empty_models import empty_model

parser = estimate_command_parser()
for flags in ([], ["--trust_remote_code"]):
    asked = parser.parse_args([sys.argv[1], *flags])
    try:
        empty_model(asked.model_name, trust_remote_code=asked.trust_remote_code)
    except AccelerateError as error:
        print(error)
    print("executed" if os.path.exists(os.environ["MARKER"]) else "not executed")
"""


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_code_beside_a_model_is_executed_only_with_trust_remote_code(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "own_code.py").write_text(OWN_MODEL)
    classes = {"AutoConfig": "own_code.OwnConfig", "AutoModel": "own_code.OwnModel"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": classes}))
    environ = {"MARKER": str(tmp_path / "marker"), "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ESTIMATES, str(folder)],
        env=os.environ | environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["not executed", "executed"], done.stdout + done.stderr
    assert "cannot read its configuration" in lines[0]


def modes(folder: Path) -> dict[str, str]:
    return {path.name: oct(path.stat().st_mode & 0o777) for path in [folder, *folder.iterdir()]}


@pytest.mark.parametrize(("mask", "file_mode", "folder_mode"), [(0o077, "0o600", "0o700"), (0o022, "0o644", "0o755")])
def test_checkpoints_have_the_rights_that_the_user_gives_to_new_files(
    tmp_path: Path, mask: int, file_mode: str, folder_mode: str
) -> None:
    accelerator, before = prepared(), os.umask(mask)
    try:
        accelerator.save_state(tmp_path / "checkpoint")
    finally:
        os.umask(before)
    found = modes(tmp_path / "checkpoint")
    assert found.pop("checkpoint") == folder_mode
    assert set(found.values()) == {file_mode}
