from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from accelerate_cpp.commands import launch
from accelerate_cpp.devices.affinity import pinned
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan.launch_plan import LaunchOptions
from accelerate_cpp.launch.plan.settings import FP8_FLAGS

MODULES_AFTER = """
import sys
from accelerate_cpp.commands.launch import main
sys.argv = ["launch", *sys.argv[1:]]
try:
    main()
except SystemExit:
    pass
print([name for name in sys.modules if name.split(".")[0] in ("torch", "numpy") or name == "accelerate_cpp._C"])
"""


def _run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "accelerate_cpp.commands.launch", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("open('ran', 'w')\n")
    return tmp_path


def test_every_option_of_a_plan_is_a_flag() -> None:
    parsed = vars(launch.launch_command_parser().parse_args(["train.py"]))
    assert {field.name for field in fields(LaunchOptions)} - {"fp8", "sharding"} <= parsed.keys()
    assert {f"fp8_{name}" for name in FP8_FLAGS} <= parsed.keys()


@pytest.mark.parametrize("flags", [["--max_restarts=0"], ["--tee", "0"]])
def test_flags_that_change_nothing_are_taken(flags: list[str]) -> None:
    parsed = launch.launch_command_parser().parse_args([*flags, "--cpu", "train.py"])
    assert launch.launch_options(parsed) == launch.launch_options(
        launch.launch_command_parser().parse_args(["--cpu", "train.py"])
    )


def test_flags_that_do_nothing_yet_can_be_read_and_are_refused_by_a_launch(folder: Path) -> None:
    parser = launch.launch_command_parser()
    plain = parser.parse_args(["train.py"])
    assert (plain.use_fsdp, plain.fsdp_version, plain.zero_stage) == (False, "1", None)
    args = parser.parse_args(["--aws_access_key_id", "key", "--zero_stage", "2", str(folder / "train.py")])
    assert (args.aws_access_key_id, args.zero_stage, args.use_fsdp) == ("key", "2", False)
    with pytest.raises(InvalidArgument, match="--aws_access_key_id: starting jobs on SageMaker"):
        launch.launch_command(args)
    with pytest.raises(InvalidArgument, match="--aws_access_key_id: starting jobs on SageMaker"):
        launch.launch_options(argparse.Namespace(aws_access_key_id="key"))
    assert not (folder / "ran").exists()


def test_flags_that_do_nothing_yet_are_refused_before_other_machines_are_asked(folder: Path) -> None:
    arguments = ["--hostfile", "absent", "--aws_access_key_id", "key", "train.py"]
    assert "--aws_access_key_id: starting jobs on SageMaker" in _run(*arguments, cwd=folder).stderr


def test_flags_of_split_models_have_the_originals_types() -> None:
    parser = launch.launch_command_parser()
    plain = parser.parse_args(["train.py"])
    assert (plain.use_megatron_lm, plain.megatron_lm_tp_degree, plain.megatron_lm_gradient_clipping) == (False, 1, 1.0)
    assert (plain.megatron_lm_no_load_optim, plain.megatron_lm_num_micro_batches) == (False, None)
    assert launch.launch_options(plain).sharding == {}
    given = parser.parse_args(["--megatron-lm-tp-degree", "1", "--megatron_lm_gradient_clipping", "2", "train.py"])
    assert (given.megatron_lm_tp_degree, given.megatron_lm_gradient_clipping) == (1, 2.0)
    assert launch.launch_options(given).sharding == {
        "megatron_lm_tp_degree": 1,
        "megatron_lm_gradient_clipping": 2.0,
    }  # though the first has its default


def test_a_recipe_of_fp8_is_made_of_its_flags() -> None:
    given = ["--fp8_backend", "te", "--fp8-margin", "2", "--fp8_use_autocast_during_eval", "train.py"]
    options = launch.launch_options(launch.launch_command_parser().parse_args(given))
    assert options.fp8 == {"backend": "te", "margin": "2", "use_autocast_during_eval": True}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num_proceses", "2", "train.py"], "--num_processes"),
        (["--num_processes", "0", "train.py"], "'0'"),
        (["--num_processes", "-2", "train.py"], "'-2'"),
        (["--num_processes", "two", "train.py"], "'two'"),
        (["--num_machines", "2", "train.py"], "pass --main_process_ip"),
        (["--tee", "4", "train.py"], "--tee '4': expected 0"),
        (["--max_restarts", "-1", "train.py"], "'-1'"),
        (["--mpirun_hostfile", "hosts", "train.py"], "--mpirun_hostfile hosts: cannot be read"),
        (["--mixed_precision", "fp7", "train.py"], "'fp7'"),
        (["--main_process_port", "65536", "train.py"], "'65536'"),
        (["--tpu", "--cpu", "train.py"], "--cpu and --tpu exclude each other"),
        (["--tpu", "--no_python", "ls"], "--no_python: on TPUs (--tpu) a function of a Python script is called"),
        (["--tpu", "train.py"], "launch on TPUs (--tpu): torch_xla cannot be imported"),
        (["--tpu", "--tpu_cluster", "train.py"], "--tpu_cluster: tpu_name is unknown: pass --tpu_name"),
        (["--vm", "one", "train.py"], "--vm: the machines of a pod are those of its name"),
        (
            ["--tpu", "--tpu_cluster", "--tpu_name", "pod", "--tpu_zone", "z", "--env", "x", "train.py"],
            "variable 1 for the machines of the pod (--env): expected NAME=VALUE",
        ),
        (["--use_megatron_lm", "--use_fsdp", "train.py"], "--use_fsdp and --use_megatron_lm exclude each other"),
        (["--megatron_lm_tp_degree", "two", "train.py"], "--megatron_lm_tp_degree: invalid int value: 'two'"),
        (
            ["--megatron_lm_recompute_method", "all", "train.py"],
            "--megatron_lm_recompute_method: invalid choice: 'all'",
        ),
        (
            ["--use_megatron_lm", "--megatron_lm_sequence_parallelism", "soon", "train.py"],
            "--megatron_lm_sequence_parallelism: 'soon': expected one of yes",
        ),
        (["--use_deepspeed", "--zero-stage", "4", "train.py"], "--zero_stage: invalid choice: '4'"),
        (["--use_deepspeed", "--use_fsdp", "train.py"], "--use_fsdp and --use_deepspeed exclude each other"),
        (["--use_fsdp", "--fsdp-min-num-params", "few", "train.py"], "--fsdp_min_num_params: 'few': "),
        (["--fsdp_version", "3", "train.py"], "'3'"),
        (["--fp8_backend", "own", "train.py"], "'own'"),
        (["--cpu", "absent.py"], "no script 'absent.py'"),
        (["--cpu"], "training_script"),
    ],
)
def test_bad_input_is_one_sentence_and_starts_nothing(folder: Path, arguments: list[str], words: str) -> None:
    result = _run(*arguments, cwd=folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert [path.name for path in folder.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--cpu", "--num_processes", "2", "train.py"], ["--cpu", "--use_deepspeed", "train.py"]],
)
def test_launcher_loads_neither_torch_nor_the_core(folder: Path, arguments: list[str]) -> None:
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "__init__.py").write_text("raise ImportError('DeepSpeed is for workers')")
    result = subprocess.run(
        [sys.executable, "-c", MODULES_AFTER, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"


def test_exit_status_is_that_of_the_script(folder: Path) -> None:
    (folder / "exits.py").write_text("raise SystemExit(5)")
    assert _run("--cpu", "exits.py", cwd=folder).returncode == 5


def test_more_processes_than_cores_are_warned_of_in_one_sentence_and_run_all_the_same(folder: Path) -> None:
    with pinned((min(os.sched_getaffinity(0)),)):
        result = _run("--cpu", "--enable-cpu-affinity", "--num_processes", "2", "train.py", cwd=folder)
    assert (result.returncode, (folder / "ran").exists()) == (0, True)
    assert result.stderr.startswith("accelerate-cpp launch: CPU affinity: ")
    assert result.stderr.count("\n") == 1


def test_module_and_program_are_launched_too(folder: Path) -> None:
    assert _run("--cpu", "-m", "train", cwd=folder).returncode == 0
    assert (folder / "ran").exists()
    assert _run("--cpu", "--no_python", "echo", "-n", "words", cwd=folder).stdout == "words"


def test_programs_decide_what_the_command_line_leaves_open(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    config, script = tmp_path / "c.yaml", str(folder / "train.py")
    config.write_text("distributed_type: MULTI_CPU\nnum_processes: 3\nmixed_precision: bf16\ndebug: true\n")
    given = ["--num-processes", "2", "--config-file", str(config), script, "--lr", "0.1"]
    args, defaults, of_file = launch._validate_launch_command(launch.launch_command_parser().parse_args(given))
    assert (args.num_processes, args.mixed_precision, args.debug, args.use_cpu) == (2, "bf16", True, True)
    assert args.training_script_args == ["--lr", "0.1"]
    assert (defaults.num_processes, of_file) == (3, True)
    plain = launch.launch_command_parser().parse_args(["--cpu", script])
    assert plain.training_script_args == []
    args, defaults, of_file = launch._validate_launch_command(plain)
    assert (args.num_processes, args.mixed_precision, defaults, of_file) == (1, "no", None, False)


@pytest.mark.parametrize("redirection", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_a_standard_error_that_takes_nothing_changes_no_status(tmp_path: Path, redirection: str) -> None:
    program = f"exec {sys.executable} -m accelerate_cpp.commands.launch --cpu --no_python --num_processes 2 --tee 3"
    worker = "sh -c 'seq 20000 >&2; exit 3'"  # more than what a pipe or a socket holds
    done = subprocess.run(["sh", "-c", f"{program} {worker} {redirection}"], cwd=tmp_path, timeout=240, check=False)
    assert done.returncode == 3


@pytest.mark.parametrize("num_processes", [1, 2])
def test_workers_of_a_launcher_without_standard_streams_have_some(tmp_path: Path, num_processes: int) -> None:
    """Else what they open first would get what they print."""
    program = "import os\nprint('to nobody')\nplace = 'rank-' + os.environ.get('RANK', '0')\n"
    (tmp_path / "train.py").write_text(program + "open(place, 'w').write(str(os.open('/', 0)))\n")
    launcher = f"{sys.executable} -m accelerate_cpp.commands.launch --cpu --num_processes {num_processes}"
    command = f"exec {launcher} train.py <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=240, check=False)
    assert done.returncode == 0
    opened = [int((tmp_path / f"rank-{rank}").read_text()) for rank in range(num_processes)]
    assert min(opened) > 2
