"""Changes a folder of the package in small ways, one at a time, and counts which changes its tests notice.

    pip install coverage
    python tests/mutants/run_mutants.py data --count 40 --seed 0 --report out/mutants_data.json

Each mutant meets those of --tests that run its line in their own process, as found by one run under coverage; all of
them if there are none, as for lines that run on import or in other processes; and then those of --distributed. Mutants
that change nothing that anyone could see are listed, with the reason, in equivalent.json. With --again, only those that
nobody noticed in an earlier report are run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
PACKAGE = REPOSITORY / "python" / "accelerate_cpp"
PYTEST = ["pytest", "-q", "-m", "not long", "-p", "no:cacheprovider"]

sys.path.insert(0, str(HERE))
from mutations import Mutation, mutations  # noqa: E402


def sites(folder: str) -> list[tuple[Path, Mutation]]:
    """All mutations of the folder, which is named as inside the package."""
    files = sorted((PACKAGE / folder).rglob("*.py"))
    return [(path, mutation) for path in files for mutation in mutations(path.read_text())]


def tests_by_line(tests: list[str]) -> dict[str, dict[int, set[str]]]:
    """By file and line, the tests that ran it in their own process; runs them all, under coverage."""
    from coverage import CoverageData

    with tempfile.TemporaryDirectory() as folder:
        data, configuration = Path(folder) / "coverage", Path(folder) / "coverage.cfg"
        configuration.write_text("[run]\ndynamic_context = test_function\n")
        options = [f"--data-file={data}", f"--rcfile={configuration}", f"--source={PACKAGE}"]
        subprocess.run([sys.executable, "-m", "coverage", "run", *options, "-m", *PYTEST, *tests], cwd=REPOSITORY)
        found = CoverageData(str(data))
        found.read()
        lines: dict[str, dict[int, set[str]]] = {}
        for file in found.measured_files():
            contexts = found.contexts_by_lineno(file).items()
            lines[file] = {line: {name for name in names if name} for line, names in contexts}
    return lines


def node_id(context: str) -> str:
    """The expression for ``pytest -k`` of a context such as ``test_samplers.test_name``."""
    return context.rpartition(".")[2]


def is_noticed(path: Path, mutation: Mutation, tests: list[str], names: set[str], seconds: float) -> bool:
    """Whether one of the tests fails on the mutant, or does not end."""
    module = ".".join(("accelerate_cpp", *path.relative_to(PACKAGE).with_suffix("").parts))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "mutant.py"
        source.write_text(mutation.source)
        environment = os.environ | {"MUTANT_MODULE": module, "MUTANT_SOURCE": str(source)}
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        chosen = ["-k", " or ".join(sorted(names))] if names else []
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-m",
            "not long",
            "-p",
            "no:cacheprovider",
            *chosen,
            *tests,
        ]
        try:
            done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return True
    return done.returncode not in (0, 5)  # 5: no test was chosen


def is_noticed_anywhere(path: Path, mutation: Mutation, names: set[str], arguments: argparse.Namespace) -> bool:
    """Whether a test that runs the line notices, or else one of those with processes of their own."""
    if is_noticed(path, mutation, arguments.tests, names, arguments.seconds):
        return True
    return bool(arguments.distributed) and is_noticed(path, mutation, arguments.distributed, set(), arguments.seconds)


def main() -> None:
    """Runs the sample, prints each mutant that nobody noticed, and the share of those that were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="*", default=["tests/python"])
    parser.add_argument("--distributed", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=600.0, help="for the tests of one mutant")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--again", type=Path, metavar="REPORT", help="run those that were not noticed in REPORT")
    arguments = parser.parse_args()
    listed = json.loads((HERE / "equivalent.json").read_text())
    equivalent = {(row["file"], row["code"], row["what"]) for row in listed}
    sample = random.Random(arguments.seed).sample(sites(arguments.folder), arguments.count)
    before = json.loads(arguments.again.read_text()) if arguments.again else []
    known = {(row["file"], row["line"], row["what"]) for row in before if row["outcome"] == "noticed"}
    lines = {} if arguments.again else tests_by_line(arguments.tests)
    rows: list[dict[str, Any]] = []
    for path, mutation in sample:
        file = str(path.relative_to(PACKAGE))
        contexts = lines.get(str(path), {}).get(mutation.line, set())
        names = {node_id(context) for context in contexts}
        code = path.read_text().splitlines()[mutation.line - 1].strip()
        if (file, code, mutation.what) in equivalent:
            outcome = "equivalent"
        elif (file, mutation.line, mutation.what) in known or is_noticed_anywhere(path, mutation, names, arguments):
            outcome = "noticed"
        else:
            outcome = "unnoticed"
        rows.append({"file": file, "line": mutation.line, "what": mutation.what, "outcome": outcome})
        print(f"{outcome:<12}{file}:{mutation.line}: {mutation.what}", flush=True)
    counted = [row for row in rows if row["outcome"] != "equivalent"]
    noticed = sum(row["outcome"] == "noticed" for row in counted)
    print(f"{noticed} of {len(counted)} noticed ({noticed / max(1, len(counted)):.2f})")
    if arguments.report is not None:
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
