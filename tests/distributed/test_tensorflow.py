"""TensorFlow on several processes: collectives, gradients, data, checkpoints, and lost ranks."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorflow_ranks as ranks
from launched import patient_launch
from processes import run_processes

# Never imported here: it would stay in the process of all tests.
pytestmark = pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCH = [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", "--num_processes", "2"]
ENVIRONMENT = {**os.environ, **ranks.QUIET}
CHECKS = [
    "collectives_give_what_those_of_torch_give",
    "gradients_are_those_of_the_functional_collectives_of_torch",
    "collectives_of_a_graph_keep_the_order_of_the_program",
    "collectives_in_loops_and_branches_of_a_graph",
    "errors_have_the_types_of_this_package",
    "nests_and_dtypes_survive",
    "gradients_are_averaged_with_slices_and_nothing",
    "a_gradient_that_one_rank_lacks",
    "memory_is_shared_and_inputs_stay_as_they_are",
    "batches_of_arrays",
    "datasets_are_sharded",
    "checkpoints_come_back",
    "variables_are_those_of_rank_0",
]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks found: importing TensorFlow takes seconds, so one pair of them does everything."""
    return run_processes(ranks.each_part, 2, str(tmp_path_factory.mktemp("parts")), environment=ranks.QUIET)


@pytest.mark.parametrize("check", CHECKS)
def test_part(check: str, parts: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(parts):
        assert check in found, f"rank {rank} did not get there"
        assert found[check] is None, f"rank {rank}: {found[check]}"


def test_all_parts_are_asked_for(parts: list[dict[str, Any]]) -> None:
    assert list(parts[0]) == CHECKS


def test_two_processes_train_as_tensorflow_alone_does() -> None:
    (alone,) = run_processes(ranks.trained, 1, True, environment=ranks.QUIET)
    for weights in run_processes(ranks.trained, 2, False, environment=ranks.QUIET):
        for found, expected in zip(weights, alone, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_examples_of_the_docstrings_run() -> None:
    (wrong,) = run_processes(ranks.examples_in_docstrings, 1, ("accelerate_cpp.tensorflow",), environment=ranks.QUIET)
    assert wrong == []


def test_code_of_the_page_prints_what_the_page_shows() -> None:
    page = EXAMPLES.parent / "docs/tensorflow.md"
    (wrong,) = run_processes(ranks.wrong_blocks, 1, str(page), environment=ranks.QUIET)
    assert wrong == []


@pytest.mark.parametrize(
    ("plain", "ours"),
    [("tensorflow_digits_plain.py", "tensorflow_digits.py"), ("keras_digits_plain.py", "keras_digits.py")],
)
def test_the_example_learns_as_its_twin_without_this_package(plain: str, ours: str, tmp_path: Path) -> None:
    runs, twins = {}, (EXAMPLES / plain, EXAMPLES / ours)
    for number, command in enumerate(([sys.executable, twins[0]], [*LAUNCH, twins[1]])):
        metrics = tmp_path / f"{number}.json"
        epochs = ["--epochs", "2", "--metrics", metrics]
        done = subprocess.run([*map(str, [*command, *epochs])], capture_output=True, text=True, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("epoch 1:") == 1
        runs[number] = json.loads(metrics.read_text())
    assert [row["loss"] for row in runs[1]] == pytest.approx([row["loss"] for row in runs[0]], rel=1e-5)
    assert runs[1][-1]["accuracy"] > 0.85
    changed = [line for line in difflib.ndiff(*(path.read_text().splitlines() for path in twins)) if line[:2] == "+ "]
    code = [line for line in changed if "on any number" not in line and "help=" not in line and line.strip("+ ")]
    assert len(code) <= 6, code


LOSES_A_RANK = """\
import os, signal
import tensorflow as tf
from accelerate_cpp import tensorflow as ours

def killed():
    if ours.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

@tf.function
def steps(x):
    for number in tf.range(1000000):
        x = ours.all_reduce(x, "mean")
        if number == 20:
            tf.py_function(killed, [], [])
    return x

steps(tf.constant(1.0))
"""


def test_a_killed_rank_is_named_while_the_others_are_in_a_graph(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOSES_A_RANK)
    launch = patient_launch(supervisor_REPORT_SECONDS=60.0)
    command = [*launch, "--cpu", "--num_processes", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 137, done.stderr
    assert "failed first: killed by SIGKILL (signal 9)" in done.stderr
    assert "rank 0: accelerate_cpp.errors.PeerLost: all_reduce" in done.stderr
    assert "train.py:12 on rank 0 waited for rank 1" in done.stderr
