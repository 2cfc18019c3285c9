"""Names that programs reach for, private ones as well, are here and in the original; and how they are found."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import accelerate
import pytest

import accelerate_cpp
from list_reached_names import Missing, in_package, look_up, main, names_of_file

CONTRACT = json.loads(Path(__file__).with_name("reached_names.json").read_text())
# Reached for by programs that are in no registry, or in ways that a look at the source does not find.
MORE = (
    "accelerate.Accelerator._dataloaders",
    "accelerate.Accelerator._do_sync",
    "accelerate.Accelerator._optimizers",
    "accelerate.Accelerator._prepare_deepspeed",
    "accelerate.Accelerator._prepare_device_mesh",
    "accelerate.Accelerator._prepare_fsdp2",
    "accelerate.Accelerator._prepare_megatron_lm",
    "accelerate.Accelerator._prepare_one",
    "accelerate.Accelerator._prepare_tp",
    "accelerate.Accelerator._schedulers",
    "accelerate.big_modeling._attach_context_parallel_hooks",
    "accelerate.commands.merge.merge_command",
    "accelerate.state.AcceleratorState._known_attrs",
    "accelerate.state.AcceleratorState._shared_state",
    "accelerate.state.PartialState._known_attrs",
    "accelerate.state.PartialState._prepare_backend",
    "accelerate.parallelism_config.ParallelismConfig._set_size",
    "accelerate.utils.InitProcessGroupKwargs.__post_init__",
    "accelerate.utils.constants.FSDP_MODEL_NAME",
    "accelerate.utils.fsdp_utils.fsdp2_canonicalize_names",
    "accelerate.utils.fsdp_utils.is_compiled_module",
    "accelerate.utils.modeling._get_proper_dtype",
    "accelerate.utils.operations.ConvertOutputsToFp32",
)
# How the original finds out whose mpirun there is; here it is told by what the program itself prints.
WITHOUT_MEANING = {"accelerate.utils.launch.which", "accelerate.utils.launch.subprocess.check_output"}
NAMES = sorted({*CONTRACT["names"], *MORE} - WITHOUT_MEANING)


@pytest.mark.usefixtures("fresh_states")
@pytest.mark.parametrize("package", [accelerate_cpp, accelerate], ids=lambda package: package.__name__)
def test_every_name_that_programs_reach_for_is_there(package: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = set(in_package(NAMES, package.__name__))  # type: ignore[attr-defined]
    assert [name for name in NAMES if name not in found] == []


def test_names_of_programs_are_found_in_all_the_ways_in_which_they_are_written() -> None:
    text = """
import accelerate
import accelerate.utils.other as other
from accelerate.state import AcceleratorState, is_initialized as started
from accelerate import Accelerator as Run

run = Run(cpu=True)
class Trainer:
    def __init__(self):
        self.accelerator = Run()
        self.accelerator._prepare_cp(run._models, run.state.device)
        accelerate.state.set_up, other.save, started, AcceleratorState._shared_state
        AcceleratorState().device
        patch("accelerate.launchers.is_cuda")
        getattr(self.other, "accelerate")
"""
    assert names_of_file(text) == {
        "accelerate",
        "accelerate.Accelerator",
        "accelerate.Accelerator._models",
        "accelerate.Accelerator._prepare_cp",
        "accelerate.Accelerator.state",
        "accelerate.launchers.is_cuda",
        "accelerate.state",
        "accelerate.state.AcceleratorState",
        "accelerate.state.AcceleratorState._shared_state",
        "accelerate.state.AcceleratorState.device",
        "accelerate.state.is_initialized",
        "accelerate.state.set_up",
        "accelerate.utils.other",
        "accelerate.utils.other.save",
    }


def test_the_contract_keeps_what_the_original_has_and_says_who_wants_it(tmp_path: Path) -> None:
    for program, line in (("one", "PartialState"), ("two", "PartialState, NoSuchName")):
        (tmp_path / "sources" / program).mkdir(parents=True)
        (tmp_path / "sources" / program / "x.py").write_text(f"from accelerate.state import {line}\n")
    main(tmp_path / "sources", tmp_path / "names.json")
    assert json.loads((tmp_path / "names.json").read_text())["names"] == {
        "accelerate.state.PartialState": ["one", "two"]
    }


def test_what_is_missing_is_said() -> None:
    for name in ("accelerate.nothing", "accelerate.Accelerator.nothing", "accelerate.utils.other.nothing"):
        with pytest.raises(Missing, match="nothing"):
            look_up(name, "accelerate_cpp")
