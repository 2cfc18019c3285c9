"""Runs the unit tests of the original, from an unpacked source distribution, on both packages, and counts.

    python tests/programs/run_originals_tests.py FOLDER [FILE ...] [--report outcomes.json]

FOLDER is what `pip download --no-deps --no-binary :all: accelerate==1.15.0` gives, unpacked. The tests run on the CPU
and without network, each file of them in a process of its own, by this package through the alias and by the original.
``originals_tests.json`` has the files that are left out, and the tests that pass on the original alone, with a reason
for each. The exit code is 1 when a test that is not there passes on the original alone, or one that is there passes.

This file is also the plugin by which pytest, in those processes, writes down the outcome of each test.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXPECTATIONS = HERE / "originals_tests.json"
OURS, ORIGINAL = SIDES = ("accelerate_cpp", "accelerate")
SECONDS_PER_TEST, SECONDS_PER_FILE = 600, 1800  # only what hangs takes so long
_OUTCOMES = "ORIGINALS_TESTS_OUTCOMES"  # where the plugin writes

Outcomes = dict[str, str]
"""Of each test ``file::Class::name``: passed, failed, skipped or unfinished."""


def pytest_configure() -> None:
    """Lets tests of the memory that is left see what this process takes, not what others of the machine do."""
    import psutil

    process, of_machine = psutil.Process(), psutil.virtual_memory()
    psutil.virtual_memory = lambda: of_machine._replace(available=of_machine.total - process.memory_info().rss)


def pytest_collection_finish(session: Any) -> None:
    """Writes that each test is unfinished, which stays true if the process dies."""
    _write((item.nodeid, "unfinished") for item in session.items)


def pytest_runtest_logreport(report: Any) -> None:
    """Writes how a test, its preparation, its end or a part of it ended."""
    if report.when == "call" or report.outcome != "passed":
        _write([(report.nodeid, report.outcome)])


def _write(outcomes: Iterable[tuple[str, str]]) -> None:
    with open(os.environ[_OUTCOMES], "a") as file:
        file.writelines(json.dumps(outcome) + "\n" for outcome in outcomes)


def _read(path: Path) -> Outcomes:
    outcomes: Outcomes = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        test, outcome = json.loads(line)
        if outcomes.get(test) != "failed":  # a part that failed, or what came before
            outcomes[test] = outcome
    return outcomes


@dataclass(frozen=True)
class Comparison:
    """What the tests came to on both packages, beside what is expected."""

    outcomes: dict[str, Outcomes]
    expected: dict[str, str]

    @property
    def on_original(self) -> set[str]:
        return {test for test, outcome in self.outcomes[ORIGINAL].items() if outcome == "passed"}

    @property
    def on_ours(self) -> set[str]:
        return {test for test, outcome in self.outcomes[OURS].items() if outcome == "passed"}

    @property
    def surprises(self) -> list[str]:
        """Tests that pass on the original alone and are not listed, and listed ones that pass or do not exist."""
        alone = self.on_original - self.on_ours
        here = self.outcomes[OURS].keys() | self.outcomes[ORIGINAL].keys()
        return [
            *(f"passes on the original alone: {test}" for test in sorted(alone - self.expected.keys())),
            *(f"is listed, and passes: {test}" for test in sorted(self.expected.keys() & self.on_ours)),
            *(f"is listed, and there is no such test: {test}" for test in sorted(self.expected.keys() - here)),
        ]

    def __str__(self) -> str:
        both, only_here = self.on_original & self.on_ours, self.on_ours - self.on_original
        return (
            f"{len(self.on_original)} tests pass on the original here, {len(both)} of them on this package; "
            f"{len(self.on_original - both)} on the original alone, {len(only_here)} on this package alone"
        )


def compare(
    folder: Path, files: Iterable[str] = (), expectations: Path = EXPECTATIONS, output: Path | None = None
) -> Comparison:
    """Runs the tests of an unpacked source distribution on both packages.

    Args:
        folder: the distribution; nothing is written into it.
        files: names of files in its folder ``tests``; without any, all that are not left out.
        expectations: which are left out, and which tests may pass on the original alone.
        output: a folder for what pytest says of each file on each package.

    Raises:
        FileNotFoundError: the folder has no tests.
    """
    known = json.loads(expectations.read_text())
    found = (folder / "tests").glob("test_*.py")
    present = [path.name for path in sorted(found, key=lambda path: -path.stat().st_size)]  # the longest come first
    if not present:
        raise FileNotFoundError(f"{folder} has no tests/test_*.py: pass the folder of an unpacked source distribution")
    chosen = list(files) or [name for name in present if name not in known["left out"]]
    outcomes: dict[str, Outcomes] = {side: {} for side in SIDES}
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [(side, pool.submit(_run, folder, name, side, Path(place), output)) for name in chosen for side in SIDES]
        for side, run in runs:
            outcomes[side] |= run.result()
    expected = {test: reason for test, reason in known["original alone"].items() if test.partition("::")[0] in chosen}
    return Comparison(outcomes, expected)


def _run(folder: Path, name: str, side: str, place: Path, output: Path | None) -> Outcomes:
    """One file of tests on one package, in a copy of the tests, since they write beside themselves."""
    own = place / f"{side}-{name}"
    shutil.copytree(folder / "tests", own / "tests")
    options = ["-p", Path(__file__).stem, "-p", "no:cacheprovider", "-q", "-c", os.devnull, "--rootdir", str(own)]
    command = [sys.executable, "-m", "pytest", *options, f"--timeout={SECONDS_PER_TEST}", f"tests/{name}"]
    said = (output or own) / f"{side}-{name}.txt"
    with open(said, "w") as file:
        # A group of its own, which ends together: tests start processes.
        process = subprocess.Popen(
            command, cwd=own, env=_environment(side, own), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(SECONDS_PER_FILE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return {test.removeprefix("tests/"): outcome for test, outcome in _read(own / "outcomes").items()}


def _environment(side: str, own: Path) -> dict[str, str]:
    """For tests in the folder ``own``: which package it is, and no GPU, no network, no configuration of the user."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "TMPDIR": str(own),
        _OUTCOMES: str(own / "outcomes"),
        "ACCELERATE_CPP_ALIAS": "1" if side == OURS else "0",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(own / "hub"),
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "OMP_NUM_THREADS": "1",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the unit tests of the original on both packages, and count.")
    parser.add_argument("folder", type=Path, help="the unpacked source distribution of the original")
    parser.add_argument("files", nargs="*", help="files of its tests, as test_utils.py; default: all")
    parser.add_argument("--expectations", type=Path, default=EXPECTATIONS, help="default: originals_tests.json")
    parser.add_argument("--output", type=Path, help="a folder, for what pytest says of each file on each package")
    parser.add_argument("--report", type=Path, help="where to write all outcomes, as JSON")
    options = parser.parse_args()
    comparison = compare(options.folder.resolve(), options.files, options.expectations, options.output)
    if options.report:
        options.report.write_text(json.dumps(comparison.outcomes, indent=1))
    print(*comparison.surprises, comparison, sep="\n")
    return 1 if comparison.surprises else 0


if __name__ == "__main__":
    sys.exit(main())
