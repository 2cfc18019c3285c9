from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from accelerate_cpp.devices import affinity
from accelerate_cpp.devices.cores import Place
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan import launch_plan as plan
from accelerate_cpp.launch.plan.launch_plan import LaunchOptions, remarks, resolve


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        plan.host_resources, "gpu_count", lambda environ: len(environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(","))
    )


def test_one_process_per_visible_gpu_is_the_default(script: str) -> None:
    assert resolve(LaunchOptions(script), {}).group.num_processes == 4
    assert resolve(LaunchOptions(script, gpu_ids="0,2"), {}).group.num_processes == 2


def test_one_process_is_the_default_on_the_cpu(script: str) -> None:
    assert resolve(LaunchOptions(script, cpu=True), {}).group.num_processes == 1
    assert resolve(LaunchOptions(script), {"ACCELERATE_USE_CPU": "yes"}).group.num_processes == 1


def test_cpu_with_two_processes_is_two_processes(script: str) -> None:
    group = resolve(LaunchOptions(script, cpu=True, num_processes=2), {}).group
    assert (group.num_processes, group.cpu) == (2, True)


def test_port_is_as_given_and_zero_or_nothing_is_a_free_one(script: str) -> None:
    assert resolve(LaunchOptions(script, main_process_port=1234), {}).group.master_port == 1234
    ports = {resolve(LaunchOptions(script, main_process_port=port), {}).group.master_port for port in (0, None)}
    assert all(port > 0 for port in ports)


def test_flag_wins_over_the_variable_and_the_variable_over_the_default(script: str) -> None:
    environ = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert resolve(LaunchOptions(script, mixed_precision="no"), environ).group.mixed_precision == "no"
    assert resolve(LaunchOptions(script), environ).group.mixed_precision == "bf16"
    assert resolve(LaunchOptions(script), {}).group.mixed_precision == "no"


@pytest.mark.parametrize(
    ("flags", "environ"), [({"enable_cpu_affinity": True}, {}), ({}, {"ACCELERATE_CPU_AFFINITY": "1"})]
)
def test_workers_are_pinned_by_a_flag_or_a_variable_with_a_thread_for_each_core(
    script: str, monkeypatch: pytest.MonkeyPatch, flags: dict[str, bool], environ: dict[str, str]
) -> None:
    monkeypatch.setattr(affinity, "_usable", lambda: tuple(range(6)))
    monkeypatch.setattr(affinity, "read_places", lambda cores: {core: Place(0, 0, core) for core in cores})
    monkeypatch.setattr(plan.host_resources, "usable_cores", lambda: 6)
    group = resolve(LaunchOptions(script, cpu=True, num_processes=2, **flags), environ).group
    assert group.shares == ((0, 1, 2), (3, 4, 5))
    assert group.num_threads == 3
    assert resolve(LaunchOptions(script, cpu=True, num_processes=2), {}).group.shares == ()


def test_pinned_workers_on_gpus_are_near_those_that_they_see(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"0,1,2,3": [0, 0, 1, 1], "2,0": [1, 0]}
    monkeypatch.setattr(affinity, "_usable", lambda: tuple(range(4)))
    monkeypatch.setattr(affinity, "read_places", lambda cores: {core: Place(core // 2, 0, core) for core in cores})
    monkeypatch.setattr(affinity, "gpu_nodes", lambda environ: nodes[environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3")])
    assert resolve(LaunchOptions(script, enable_cpu_affinity=True), {}).group.shares == ((0,), (1,), (2,), (3,))
    near = resolve(LaunchOptions(script, enable_cpu_affinity=True, gpu_ids="2,0"), {}).group.shares
    assert near == ((2, 3), (0, 1))


def test_all_gpus_leave_the_visible_devices_alone(script: str) -> None:
    assert resolve(LaunchOptions(script, gpu_ids="all"), {}).group.gpu_ids is None
    assert resolve(LaunchOptions(script, gpu_ids=" 0, 1"), {}).group.gpu_ids == "0,1"
    assert resolve(LaunchOptions(script, gpu_ids="0", cpu=True), {}).group.gpu_ids is None


def test_command_is_a_script_a_module_or_a_program(script: str, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.touch(mode=0o755)
    environ = {"PATH": str(tmp_path)}
    assert resolve(LaunchOptions(script, ("--x",)), {}).command == (sys.executable, script, "--x")
    assert resolve(LaunchOptions("pkg.train", ("1",), module=True), {}).command == (
        sys.executable,
        "-m",
        "pkg.train",
        "1",
    )
    assert resolve(LaunchOptions("program", no_python=True), environ).command == (str(program),)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_machines": 2}, "pass --main_process_ip"),
        ({"num_machines": 2, "machine_rank": 2}, "rank 2 of 2"),
        ({"num_machines": 2, "main_process_ip": "head", "num_processes": 3}, "pass a multiple of 2"),
        (
            {"num_machines": 2, "main_process_ip": "head", "num_processes": 2, "rdzv_backend": "c10d", "monitor": True},
            "--monitor only shows workers that this launcher supervises",
        ),
        (
            {"num_machines": 2, "main_process_ip": "head", "num_processes": 2, "max_restarts": 1, "report": "r.json"},
            "--report only tells of workers that this launcher supervises",
        ),
        ({"tee": "x"}, "--tee 'x'"),
        ({"machine_rank": 1}, "only rank is 0"),
        ({"cpu": True, "multi_gpu": True}, "exclude each other"),
        ({"multi_gpu": True, "num_processes": 1}, "at least 2 processes"),
        ({"gpu_ids": "0,,1"}, "expected 'all' or ids"),
        ({"module": True, "no_python": True}, "exclude each other"),
        ({"training_script": "absent.py"}, "no script 'absent.py'"),
        ({"training_script": "absent-program", "no_python": True}, "no executable 'absent-program'"),
    ],
)
def test_what_cannot_be_launched_is_refused_in_one_sentence(
    script: str, flags: dict[str, object], message: str
) -> None:
    options = LaunchOptions(**{"training_script": script, **flags})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=message) as refusal:
        resolve(options, {})
    assert "\n" not in str(refusal.value)


def test_processes_are_shared_out_to_the_machines(script: str) -> None:
    several = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "head"}
    group = resolve(LaunchOptions(script, num_processes=6, **several), {}).group  # type: ignore[arg-type]
    assert (group.num_processes, group.world_size, list(group.ranks)) == (3, 6, [3, 4, 5])
    assert (group.master_addr, group.master_port) == ("head", 29500)
    assert resolve(LaunchOptions(script, **several), {}).group.world_size == 8  # type: ignore[arg-type]


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "gpu[1-2]",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}


def test_machines_are_found_out_unless_a_flag_says_one(script: str) -> None:
    plan = resolve(LaunchOptions(script, cpu=True), SLURM)
    assert (plan.group.world_size, list(plan.group.ranks), plan.group.master_addr) == (2, [1], "gpu1")
    assert resolve(LaunchOptions(script, cpu=True, num_machines=1), SLURM).group.world_size == 1


def test_number_of_this_machine_is_found_out_unless_a_flag_says_it(script: str) -> None:
    several = LaunchOptions(script, cpu=True, num_machines=2, main_process_ip="head")
    assert list(resolve(several, SLURM).group.ranks) == [1]
    assert list(resolve(replace(several, machine_rank=0), SLURM).group.ranks) == [0]
    of_a_job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    assert list(resolve(several, of_a_job).group.ranks) == [0]
    with pytest.raises(InvalidArgument, match="start it with `srun"):
        resolve(LaunchOptions(script, cpu=True), of_a_job)


def test_mpi_is_started_unless_it_has_started_this_launcher(script: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\nb\n")
    asked = LaunchOptions(script, cpu=True, mpirun_hostfile=str(tmp_path / "hosts"), num_processes=4)
    plan = resolve(asked, {})
    assert (plan.mpirun, plan.group.world_size, plan.group.master_addr) == (tmp_path / "hosts", 4, "a")
    assert resolve(replace(asked, num_machines=1), {}).group.launchers.count == 1
    started = {f"OMPI_COMM_WORLD_{name}": value for name, value in {"SIZE": "2", "RANK": "1"}.items()}
    started |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    plan = resolve(replace(asked, main_process_ip="a"), started)
    assert (plan.mpirun, list(plan.group.ranks)) == (None, [2, 3])


def test_alias_needs_its_file(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(plan.site, "getusersitepackages", lambda: str(tmp_path / "user"))
    with pytest.raises(InvalidArgument, match=r"accelerate_cpp_start\.pth.*import accelerate_cpp\.compat"):
        resolve(LaunchOptions(script, alias=True), {})
    (tmp_path / "accelerate_cpp_start.pth").touch()
    assert resolve(LaunchOptions(script, alias=True), {}).group.alias


def test_launcher_per_worker_starts_one_worker(script: str) -> None:
    tasks = SLURM | {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
    }
    group = resolve(LaunchOptions(script), tasks).group
    assert (group.num_processes, group.world_size, list(group.ranks)) == (1, 4, [3])


def test_report_lies_beside_the_logs_unless_a_flag_says_where(script: str, tmp_path: Path) -> None:
    assert resolve(LaunchOptions(script), {}).report is None
    plan = resolve(LaunchOptions(script, log_dir=str(tmp_path)), {})
    assert plan.logs.folder is not None
    assert plan.report == plan.logs.folder / "report.json"
    assert resolve(LaunchOptions(script, report="r.json"), {}).report == Path("r.json")
    watched = LaunchOptions(
        script, log_dir=str(tmp_path), num_machines=2, main_process_ip="head", num_processes=2, max_restarts=1
    )
    assert resolve(watched, {}).report is None


def test_compiler_is_always_told(script: str) -> None:
    told = resolve(LaunchOptions(script, dynamo_backend="inductor", dynamo_use_dynamic=True), {}).group.compiler
    assert {row.name: value for row, value in told.items()} == {
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": False,
        "ACCELERATE_DYNAMO_USE_DYNAMIC": True,
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": False,
    }


@pytest.mark.parametrize(
    ("names", "asked", "meant"),
    [
        (["train.py"], "trian.py", "train.py"),
        (["examples/train.py"], "train.py", "examples/train.py"),
        (["other.py"], "train.py", None),
        (["examples/train.py"], "examples/tain.py", "examples/train.py"),
    ],
)
def test_script_that_is_not_there_may_be_one_of_a_similar_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], asked: str, meant: str | None
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument) as refusal:
        resolve(LaunchOptions(asked, cpu=True))
    told = f"there is no script {asked!r} in {tmp_path}"
    assert str(refusal.value) == (told if meant is None else f"{told}; did you mean {meant}?")


@pytest.mark.parametrize(
    ("arguments", "text", "flag"),
    [
        (("--num_processes", "2"), "", "--num_processes"),
        (("--lr", "1", "--gpu-ids=0,1"), "", "--gpu-ids"),
        (("--num_processes", "2"), "parser.add_argument('--num-processes')", None),
        (("--mixed_precision", "bf16", "--cpu", "num_processes"), "", None),
    ],
)
def test_flag_of_a_launch_that_the_script_gets_is_named(
    tmp_path: Path, arguments: tuple[str, ...], text: str, flag: str | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    options = LaunchOptions(str(script), training_script_args=arguments, cpu=True)
    told = list(remarks(resolve(options), options))
    expected = f"{flag} stands after {script}, so the script gets it; if the launch is meant, put it before {script}"
    assert told == ([] if flag is None else [expected])


@pytest.mark.parametrize(
    ("processes", "cores", "told"),
    [
        (2, 2, None),
        (3, 2, "3 processes share 2 cores: to start, and each step, takes about 1.5 times as long"),
        (2, 1, "2 processes share 1 core: to start, and each step, takes about 2 times as long"),
    ],
)
def test_more_processes_than_cores_are_said(
    script: str, monkeypatch: pytest.MonkeyPatch, processes: int, cores: int, told: str | None
) -> None:
    monkeypatch.setattr(plan.host_resources, "usable_cores", lambda: cores)
    options = LaunchOptions(script, cpu=True, num_processes=processes)
    said = list(remarks(resolve(options), options))
    assert [sentence[: len(told or "")] for sentence in said] == ([] if told is None else [told])
