"""The benchmarks measure what they say: everyone in turn, nothing that is wrong, and no failure passed over."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
pytestmark = pytest.mark.timeout(1200)  # each contestant of collectives.py is two processes that load torch
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="backend shm needs Linux")

# A benchmark without torch. Every measurement appends to the file LOG, one line per write.
SCRIPT = """
import os, signal, sys
sys.path.insert(0, {benchmarks!r})
from interleaved import Measurement, command_line, compare, serve
from workers import Contestant, own_rank

NAMES = ("first", "second")

def log(text):
    with open({log!r}, "a") as file:
        file.write(text + "\\n")

def worker(name):
    {start}
    def measure(measurement):
        log(f"{{name}} {{os.getpid()}}")
        {turn}
        return [1.0, 2.0, 6.0] if name == "first" else [0.5]
    serve(measure)

contestants = [Contestant(name) for name in NAMES]
arguments = command_line(None, contestants).parse_args()
if arguments.worker:
    worker(arguments.worker)
else:
    compare(arguments, contestants, lambda processes: [Measurement("one", NAMES), Measurement("other", NAMES)])
"""


class Runs:
    """Runs benchmarks in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"

    def small(self, *arguments: str, start: str = "", turn: str = "") -> subprocess.CompletedProcess[str]:
        script = self.folder / "small.py"
        fields = {"benchmarks": str(BENCHMARKS), "log": str(self.log), "start": start, "turn": turn}
        script.write_text(SCRIPT.format(**fields))
        return self.run(script, "--json", str(self.folder / "small.json"), *arguments)

    def run(
        self, script: Path, *arguments: str, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    def logged(self) -> list[tuple[str, int]]:
        """(contestant, process) of every line, in the order of writing."""
        return [(name, int(pid)) for name, pid in (line.split() for line in self.log.read_text().splitlines())]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import collectives

    return collectives


def rows(table: str) -> dict[tuple[str, str], list[str]]:
    """(measurement, contestant) → the other cells."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:2] == "| "]
    return {(cells[0], cells[1]): cells[2:] for cells in lines if cells[0] != "measurement"}


@linux_only
@pytest.mark.long
def test_collectives_gives_a_table_a_file_and_a_picture(runs: Runs) -> None:
    wanted = ["all_reduce fp32 4 KB", "all_reduce bf16 4 KB", "call fp32 4 KB"]
    results, picture = runs.folder / "results.json", runs.folder / "deep" / "picture.png"
    options = ["--turns", "1", "--processes", "2", "--json", str(results), "--plot", str(picture)]
    done = runs.run(BENCHMARKS / "collectives.py", *options, "--only", *wanted)
    assert done.returncode == 0, done.stderr

    shown = rows(done.stdout)
    assert {name for name, _ in shown} == set(wanted)
    for name in wanted:
        assert shown[name, "gloo"][2] == "1.000"
        assert re.fullmatch(r"[\d,.]+ [mµ]s", shown[name, "shm"][0])
    assert (wanted[0], "shm in arena") in shown
    assert ((wanted[0], "Open MPI") in shown) != ("Open MPI: not installed" in done.stdout)
    assert (wanted[1], "Open MPI") not in shown  # knows no bf16
    assert (wanted[2], "memcpy") not in shown

    document = json.loads(results.read_text())
    assert document["machine"]["cores"] == os.cpu_count()
    measured = {(row["measurement"]["name"], row["contestant"]): row for row in document["results"]}
    assert measured.keys() == shown.keys()
    assert all(len(row["turns_us"]) == 1 and row["turns_us"][0] > 0 for row in measured.values())

    from matplotlib import image

    height, width = image.imread(picture).shape[:2]
    assert width > height > 300


@linux_only
@pytest.mark.long
def test_collectives_other_than_all_reduce_are_right_and_drawn(runs: Runs) -> None:
    wanted = [f"{operation} fp32 25 MB" for operation in ("reduce_scatter", "all_gather", "broadcast")]
    picture = runs.folder / "picture.png"
    options = ["--turns", "1", "--processes", "2", "--plot", str(picture)]
    done = runs.run(BENCHMARKS / "collectives.py", *options, "--only", *wanted)
    assert done.returncode == 0, done.stderr
    contestants = {"gloo", "shm", "shm in arena"}
    assert rows(done.stdout).keys() >= {(name, contestant) for name in wanted for contestant in contestants}
    assert picture.is_file()


@linux_only
@pytest.mark.long
def test_step_measures_a_training_step(runs: Runs) -> None:
    options = ["--turns", "1", "--only", "digits", "--contestants", "torch DDP over shm", "accelerate_cpp"]
    done = runs.run(BENCHMARKS / "step.py", *options)
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout).keys() == {("digits", "torch DDP over shm"), ("digits", "accelerate_cpp")}


@linux_only
@pytest.mark.long
def test_pipeline_bubble_measures_each_schedule_beside_its_formula(runs: Runs) -> None:
    results = runs.folder / "results.json"
    options = ["--turns", "1", "--steps", "1", "--micro_batches", "4"]
    done = runs.run(BENCHMARKS / "pipeline_bubble.py", *options, "--json", str(results))
    assert done.returncode == 0, done.stderr
    measured = json.loads(results.read_text())
    schedules = ("gpipe", "1f1b", "interleaved", "zero_bubble")
    assert [(row["schedule"], row["micro_batches"]) for row in measured] == [(schedule, 4) for schedule in schedules]
    assert all(0 < row["least"] <= row["waits"] <= row["most"] < 1 for row in measured)
    assert [round(row["formula"], 3) for row in measured] == [0.2, 0.2, 0.111, 0.04]
    shown = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(shown) == 1 + len(measured)


@linux_only
@pytest.mark.long
def test_facade_measures_imports(runs: Runs) -> None:
    options = ["--turns", "1", "--only", "import beyond torch", "--contestants", "accelerate_cpp"]
    done = runs.run(BENCHMARKS / "facade.py", *options)
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout).keys() == {("import beyond torch", "accelerate_cpp")}


@linux_only
@pytest.mark.long
def test_data_measures_batches(runs: Runs) -> None:
    done = runs.run(BENCHMARKS / "data.py", "--turns", "1", "--contestants", "accelerate_cpp")
    assert done.returncode == 0, done.stderr
    assert len(rows(done.stdout)) == 5


@pytest.mark.long
def test_placement_measures_maps_and_offloaded_layers(runs: Runs) -> None:
    contestants = ["accelerate_cpp", "no hooks"]
    options = ["--turns", "1", "--only", "*small layer", "--contestants", *contestants]
    done = runs.run(BENCHMARKS / "placement.py", *options)
    assert done.returncode == 0, done.stderr
    wanted = [f"{way}_offload, small layer" for way in ("cpu", "disk")]
    assert rows(done.stdout).keys() == {(name, contestant) for name in wanted for contestant in contestants}


@pytest.mark.long
def test_checkpoint_measures_saving_and_loading(runs: Runs) -> None:
    options = ["--turns", "1", "--megabytes", "13", "--folder", str(runs.folder), "--contestants", "accelerate_cpp"]
    done = runs.run(BENCHMARKS / "checkpoint.py", *options)
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout).keys() == {(name, "accelerate_cpp") for name in ("save", "stall", "load")}
    assert not list(runs.folder.glob("checkpoint-benchmark-*"))


def test_a_peer_that_is_not_installed_is_a_line_and_the_others_go_on(runs: Runs) -> None:
    bare = {**os.environ, "PATH": str(runs.folder)}
    options = ["--turns", "1", "--processes", "2", "--contestants", "Open MPI", "memcpy", "--only", "*fp32 4 KB"]
    done = runs.run(BENCHMARKS / "collectives.py", *options, environment=bare)
    assert done.returncode == 0, done.stderr
    assert "Open MPI: not installed" in done.stdout
    if (os.cpu_count() or 1) >= 2:
        assert rows(done.stdout).keys() == {("all_reduce fp32 4 KB", "memcpy")}


def test_the_expected_results_fit_together(collectives: ModuleType) -> None:
    import numpy as np

    shares = [collectives.expected("reduce_scatter", 24, rank, 3) for rank in range(3)]
    assert np.concatenate(shares).tolist() == collectives.expected("all_reduce", 24, 0, 3).tolist()
    assert collectives.expected("all_reduce", 24, 0, 3)[8] == (1 + 0) + (1 + 1) + (1 + 2)
    assert collectives.expected("all_gather", 24, 0, 3).tolist() == [
        i % 7 + rank for rank in range(3) for i in range(8)
    ]
    assert collectives.expected("broadcast", 24, 0, 3)[8] == 1 + 2


@pytest.mark.parametrize("missing_bytes", [0, 4])
def test_a_wrong_result_is_refused(collectives: ModuleType, missing_bytes: int) -> None:
    case = collectives.Case("copy fp32 4 KB", (), "copy", "fp32", 4096)
    engine = collectives.CopyEngine(1, 2)
    given, result = engine.empty(1024, "fp32"), engine.empty(1024, "fp32")
    short = (4096 - missing_bytes) // 4

    def run() -> None:
        result[:short] = given[:short]

    if missing_bytes == 0:
        collectives.check(engine, case, run, given, result)
        return
    with pytest.raises(SystemExit, match=r"1 wrong elements of 1,024: element 1023 is 99\.0, not 2\.0"):
        collectives.check(engine, case, run, given, result)


def test_contestants_are_compared_turn_by_turn(runs: Runs) -> None:
    done = runs.small("--turns", "3")
    assert done.returncode == 0, done.stderr
    first, second = json.loads((runs.folder / "small.json").read_text())["results"][:2]
    assert (first["contestant"], first["median_us"], first["mean_us"]) == ("first", 2e6, 3e6)
    assert (second["fraction"], second["quartiles"], second["turns_us"]) == (0.25, [0.25, 0.25], [5e5] * 3)
    assert rows(done.stdout)["other", "second"] == ["500.0 ms", "500.0 ms", "0.250", "0.250 to 0.250"]


def test_a_turn_begins_only_when_every_worker_of_the_turn_before_has_finished(runs: Runs) -> None:
    more_on_the_last_rank = "[log(f'{name} {os.getpid()}') for _ in range(own_rank() * 99)]"
    done = runs.small("--turns", "2", "--processes", "2", "--only", "one", turn=more_on_the_last_rank)
    assert done.returncode == 0, done.stderr
    names = [name for name, _ in runs.logged()]
    assert names == (["first"] * 101 + ["second"] * 101) * 4  # 2 turns and 2 to warm up


def test_a_worker_that_fails_ends_the_benchmark_with_its_error_and_all_workers(runs: Runs) -> None:
    fail = "\n        ".join(
        ["if name == 'second':", "    if own_rank() == 1: raise ValueError('no memory left')", "    signal.pause()"]
    )
    done = runs.small(start="log(f'{name} {os.getpid()}')", turn=fail)
    assert done.returncode == 1
    assert "a worker of 'second' failed in 'one'" in done.stderr
    assert "ValueError: no memory left" in done.stderr
    workers = {pid for _, pid in runs.logged()}
    assert len(workers) == 4
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_worker_that_is_killed_ends_the_benchmark(runs: Runs) -> None:
    done = runs.small(turn="os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == 1
    assert "a worker of 'first' ended in 'one' without a word" in done.stderr


def test_a_worker_that_cannot_start_ends_the_benchmark(runs: Runs) -> None:
    done = runs.small(start="raise RuntimeError('no such backend')")
    assert done.returncode == 1
    assert "RuntimeError: no such backend" in done.stderr
    assert "a worker of 'first' ended before it was ready" in done.stderr


def test_a_pattern_that_fits_nothing_is_answered_with_what_there_is(runs: Runs) -> None:
    done = runs.small("--only", "nothing")
    assert done.returncode == 1
    assert re.search(r"there are\s+one\s+other", done.stderr)
