"""When DeepSpeed's own launcher starts the workers, and by which command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from accelerate_cpp.config.env_table import CORES
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan import launch_plan
from accelerate_cpp.launch.plan.dry_run import render
from accelerate_cpp.launch.plan.launch_plan import LaunchOptions, LaunchPlan, remarks, resolve
from accelerate_cpp.launch.workers import exec_with_rank

WAY = "deepspeed_multinode_launcher"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a script and a file of two machines, and DeepSpeed, whatever is installed here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(launch_plan, "has_code", lambda module: True)
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text("# ours\na slots=4\nb   slots=2 # small\n\n")
    return tmp_path


def planned(environ: Mapping[str, str] | None = None, **options: Any) -> LaunchPlan:
    given = {"num_machines": 2, "deepspeed_hostfile": "hosts", "cpu": True} | options
    said = {name: value for name, value in given.items() if name.startswith("deepspeed")}
    sharding = {"use_deepspeed": True, **said}
    return resolve(LaunchOptions("train.py", ("--lr", "1"), sharding=sharding, **given), environ or {})


def command(**options: Any) -> str:
    return " ".join(planned(**options).deepspeed_command)


TAIL = "--master_port 29500 train.py --lr 1"


def test_a_file_of_machines_is_for_deepspeeds_launcher() -> None:
    assert command() == f"deepspeed --hostfile hosts --no_local_rank --launcher pdsh {TAIL}"
    assert command(num_processes=4, main_process_ip="a", main_process_port=1234) == (
        "deepspeed --hostfile hosts --no_local_rank --launcher pdsh --num_gpus 2 --master_addr a --master_port 1234 "
        "train.py --lr 1"
    )


def test_filters_stand_for_the_number_of_processes() -> None:
    start = "deepspeed --hostfile hosts --no_local_rank --launcher"
    assert command(deepspeed_exclusion_filter="a:0", num_processes=3) == f"{start} pdsh --exclude a:0 {TAIL}"
    found = command(deepspeed_inclusion_filter="a:0", num_machines=5, **{WAY: "SLURM"})
    assert found.startswith(f"{start} slurm --include a:0 ")


def test_modules_and_programs_are_named_so(folder: Path) -> None:
    assert command(module=True).endswith("29500 --module train.py --lr 1")
    (folder / "train.py").chmod(0o755)
    assert command(no_python=True, environ={"PATH": str(folder)}).endswith("29500 --no_python train.py --lr 1")


def test_without_ssh_each_machine_has_its_number() -> None:
    assert command(machine_rank=1, **{WAY: "nossh"}) == (
        f"deepspeed --hostfile hosts --node_rank 1 --no_ssh --no_local_rank {TAIL}"
    )


@pytest.mark.parametrize("way", ["openmpi", "mvapich", "mpich", "impi", "slurm"])
def test_where_workers_are_not_told_their_ranks_a_program_finds_them(way: str) -> None:
    plan = planned(**{WAY: way})
    finds = exec_with_rank.__file__ in plan.deepspeed_command
    assert finds == (way not in ("mpich", "impi"))
    script = plan.deepspeed_command[plan.deepspeed_command.index("29500") + 1 :]
    assert script == ((exec_with_rank.__file__, *plan.command) if finds else ("train.py", "--lr", "1"))


def test_through_mpi_the_file_has_the_number_of_processes() -> None:
    assert command(num_processes=6, **{WAY: "impi"}) == (
        f"deepspeed --hostfile hosts --no_local_rank --launcher impi {TAIL}"
    )
    with pytest.raises(InvalidArgument, match=r"num_processes is 4 \(--num_processes\), but impi .* of the 6 slots"):
        planned(num_processes=4, **{WAY: "impi"})


@pytest.mark.parametrize(
    "options",
    [
        {"num_machines": 1},
        {"deepspeed_hostfile": None, "main_process_ip": "a"},
        {WAY: "standard", "main_process_ip": "a"},
    ],
)
def test_else_the_launcher_of_this_package_starts_the_workers(options: dict[str, Any]) -> None:
    plan = planned(num_processes=4, **options)
    assert (plan.deepspeed, plan.deepspeed_command) == (None, ())
    assert plan.group.num_processes == 4 // plan.group.launchers.count


def test_the_file_of_the_launch_may_say_all_this(folder: Path) -> None:
    (folder / "c.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_machines: 2\nnum_processes: 2\nuse_cpu: true\ndeepspeed_config:\n"
        "  deepspeed_hostfile: hosts\n  deepspeed_multinode_launcher: nossh\n"
    )
    plan = resolve(LaunchOptions("train.py", config_file="c.yaml"), {})
    assert " ".join(plan.deepspeed_command).startswith("deepspeed --hostfile hosts --node_rank 0 --no_ssh ")
    assert plan.settings["deepspeed_hostfile"].source == "c.yaml: deepspeed_hostfile"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deepspeed_hostfile": None, WAY: "pdsh"}, "is pdsh .*, which needs a file .*: pass --deepspeed_hostfile"),
        ({"deepspeed_hostfile": "absent"}, "--deepspeed_hostfile absent: cannot be read"),
        ({"num_machines": 3}, r"hosts \(--deepspeed_hostfile\) has 2 machines, but num_machines is 3"),
        ({"num_processes": 3}, "num_processes is 3 .*: expected a multiple of 2"),
        (
            {"deepspeed_exclusion_filter": "a", "deepspeed_inclusion_filter": "b"},
            r"\(--deepspeed_exclusion_filter\) and deepspeed_inclusion_filter .* exclude each other",
        ),
        (
            {"deepspeed_exclusion_filter": "a:1", WAY: "openmpi"},
            r"'a:1' \(--deepspeed_exclusion_filter\): openmpi takes no filter",
        ),
    ],
)
def test_what_deepspeed_refuses_or_ignores_is_refused_in_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        planned(**options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\nb slots=1\n", "line 1: 'a': expected a name, once in the file, and slots=N"),
        ("a slots=1\na slots=1\n", "line 2: 'a slots=1': expected a name, once in the file"),
        ("# none\n", "expected lines such as gpu1 slots=8, found none"),
    ],
)
def test_a_file_that_deepspeed_cannot_read_is_refused(folder: Path, text: str, words: str) -> None:
    (folder / "hosts").write_text(text)
    with pytest.raises(InvalidArgument, match=words):
        planned()


def test_its_environment_is_that_of_all_workers() -> None:
    plan = planned({"RANK": "3", "ACCELERATE_CPU_AFFINITY": "1"}, enable_cpu_affinity=True, num_processes=2)
    assert plan.deepspeed is not None
    told = plan.deepspeed.environment(plan.group)
    assert (told["DS_ACCELERATOR"], told["ACCELERATE_USE_DEEPSPEED"]) == ("cpu", "true")
    assert (told["MASTER_ADDR"], told["MASTER_PORT"], told["ACCELERATE_CPU_AFFINITY"]) == ("a", "29500", "1")
    assert CORES.name not in told  # which are those of this machine
    on_gpus = planned(cpu=False)
    assert on_gpus.deepspeed is not None
    assert "DS_ACCELERATOR" not in on_gpus.deepspeed.environment(on_gpus.group)


@pytest.mark.parametrize(("way", "address"), [("openmpi", "a"), ("slurm", None)])
def test_the_first_machine_of_the_file_has_rank_0_unless_slurm_chooses(way: str, address: str | None) -> None:
    found = planned(**{WAY: way}).deepspeed
    assert found is not None
    assert found.address == address
    given = planned(main_process_ip="b", **{WAY: way}).deepspeed
    assert given is not None
    assert given.address == "b"


def test_the_threads_of_workers_are_for_the_machine_with_most_of_them() -> None:
    assert planned().group.num_processes == 4
    assert planned(num_processes=2).group.num_processes == 1


def test_a_dry_run_shows_the_command() -> None:
    first, second, *others = render(planned()).splitlines()
    assert first == "on the machines of hosts, by DeepSpeed's launcher:"
    assert second == f"command: deepspeed --hostfile hosts --no_local_rank --launcher pdsh {TAIL}"
    assert "  DS_ACCELERATOR=cpu" in others


def said(plan: LaunchPlan, **options: Any) -> list[str]:
    return [sentence for sentence in remarks(plan, LaunchOptions("train.py", **options)) if "no effect" in sentence]


def test_what_has_no_effect_is_said() -> None:
    assert said(planned()) == []
    (sentence,) = said(planned(), log_dir="logs", tee="3", max_restarts=0)
    assert sentence.startswith("--log_dir, --tee: no effect, as DeepSpeed's launcher starts the workers")
    (sentence,) = said(planned(num_machines=1), deepspeed_hostfile="hosts", log_dir="logs")
    assert sentence.startswith("--deepspeed_hostfile has no effect: this launcher starts the workers")
