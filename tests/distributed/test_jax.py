"""accelerate_cpp.jax in real processes, which alone import JAX: it takes seconds, so each tries many things."""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faults import await_event, connect, meet, raised_by, rank, run_job, tell
from jax_program_data import DTYPES, values
from test_faults_interrupt import SOON, interrupted

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
LAUNCH = [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", "--num_processes"]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")


def run(*command: str | Path, fails: bool = False, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=folder)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of jax_program.py has found."""
    folder = tmp_path_factory.mktemp("jax")
    done = run(*LAUNCH, "2", HERE / "jax_program.py", folder)
    assert done.stdout.count("all was tried") == 1
    return [json.loads((folder / f"found{each}.json").read_text()) for each in range(2)]


def test_each_process_knows_its_place(found: list[dict[str, Any]]) -> None:
    assert [each["place"] for each in found] == [[0, 0, 2, True, True], [1, 1, 2, False, False]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives_of_a_dtype_give_what_numpy_makes_of_all_ranks_values(
    dtype: str, found: list[dict[str, Any]]
) -> None:
    both = np.stack([values(each, dtype) for each in range(2)])
    total = both.any(axis=0) if dtype == "bool" else both.sum(axis=0)
    for each in range(2):
        expected = {
            "all_gather": both,
            "tiled": both.reshape(4, 3),
            "broadcast": both[1],
            "sum": total,
            "max": both.max(axis=0),
            "scattered": total[each],
        }
        if dtype in ("uint16", "uint32"):
            assert "Convert the array first" in found[each][f"no max of {dtype}"]
            del expected["max"]
        for name, wanted in expected.items():
            assert found[each][f"{name} {dtype}"] == wanted.astype(np.float64).tolist(), name


def test_collectives_of_a_program_run_in_its_order_on_every_rank(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["interleaved"]
        assert each["eager"]
        assert each["not compiled"] == 3.0
        # Of 1/8 in the diagonal of 64 rows, and of what is 0 to three digits.
        assert each["staggered"] == [4.0, 8.0, 0.0, 64 * 64 + 8.0]
        assert each["beside"] == [2.0, 700 / 8]
        assert each["first sum"] == 16.0  # of 0, 1, 2, 3 and 1, 2, 3, 4


@pytest.mark.parametrize(
    "call", ["all_reduce", "mean", "all_gather", "tiled", "broadcast", "reduce_scatter", "scattered mean"]
)
def test_gradients_are_those_of_torchs_functional_collectives_and_of_jaxs_own(
    call: str, found: list[dict[str, Any]]
) -> None:
    for each in found:
        of_torch, of_lax, *ours = each[f"gradient of {call}"]
        np.testing.assert_allclose(of_torch, of_lax, rtol=1e-5, atol=1e-6)
        for gradient in ours:  # at once, within jit, and recomputed
            np.testing.assert_allclose(gradient, of_torch, rtol=1e-5, atol=1e-6)
        of_lax, own = each[f"second of {call}"]
        np.testing.assert_allclose(own, of_lax, rtol=1e-4, atol=1e-5)


def test_derivatives_go_through_loops_and_forward(found: list[dict[str, Any]]) -> None:
    for each in found:
        of_torch, ours = each["gradient of loops"]
        np.testing.assert_allclose(ours, of_torch, rtol=1e-5)
        assert each["forward"] == [3.0, -6.0, 9.0, 1.5]  # the tangents of both ranks, 1 and 2 times the same, added up
        assert "cannot be differentiated" in each["no gradient of max"]


def test_a_batch_of_operands_goes_through_one_collective(found: list[dict[str, Any]]) -> None:
    kinds = [key for key in found[0] if key.startswith("vmap of ")]
    assert len(kinds) == 12
    assert all(each[kind] for each in found for kind in kinds)


def test_loaders_give_each_rank_its_rows_in_their_memory(found: list[dict[str, Any]]) -> None:
    first, second = found[0]["orders"]
    assert sorted(first) == sorted(second) == list(range(11))
    assert first != second
    assert found[0]["repeated order"] == first
    assert found[0]["orders"] == found[1]["orders"]
    assert all(each["addresses"] == [[0, 0]] * 4 for each in found)
    assert [each["prepared"] for each in found] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_checkpoints_have_what_rank_0_has_and_name_what_does_not_fit(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["loaded"] == [[0.0, 1.0, 2.0], 7, 0.1]
        assert "missing 'parameters/0', 'parameters/1', not expected 'params/0', 'params/1'" in each["renamed"]
        assert "'params/0' has shape (3,) and torch.float32, expected (4,)" in each["reshaped"]
        assert "expected checksum" in each["damaged"]
        assert each["of numpy"] == [[[1.0 + 2.0**-50, 3.0], [2.0, 4.0]], "float64", 2**40]
    assert "int4" in found[0]["unsaved"]
    assert "rank 0 failed with InvalidArgument" in found[1]["unsaved"]


def test_averages_of_many_gradients_are_those_of_numpy(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["averages"]
        assert each["averages inside"]
        assert each["broadcast parameters"] == [[0.0, 0.0, 0.0], 0]


def test_what_cannot_be_done_is_refused_with_a_reason(found: list[dict[str, Any]]) -> None:
    expected = {
        "op": "'average': expected 'sum', 'mean'",
        "mean": "op='mean' of int32",
        "gradient": "gradients['a'] is of int32",
        "number": "gradients['a'] is of int32",
        "root": "root=2: expected a rank from 0 to 1",
        "rows": "a multiple of the number of processes, 2",
        "stack": "tiled=True divides a longer one",
        "scalar": "tiled=True needs arrays with a dimension",
        "tracer": "outside of jit",
    }
    for each in found:
        for name, text in expected.items():
            assert text in each[f"refused {name}"]


def test_ranks_that_call_different_collectives_all_say_so_and_go_on(found: list[dict[str, Any]]) -> None:
    for each in found:
        for number in range(2):
            assert f"rank {number}: all_reduce(sum) of [{number + 2}] float32" in each["mismatch"]
            shown = f"rank {number}: all_reduce of 3 arrays: float32 (3,), float32 ({number + 4},), float32 (5,)"
            assert f"{shown} at " in each["mismatched trees"]
            shown = f"rank {number}: all_reduce of 2 arrays: float32 ({number + 3},), float32 ({4 - number},)"
            assert f"{shown} at " in each["swapped"]
        assert "rank 0: broadcast of [2] float32" in each["mismatch inside"]
        assert "rank 1: all_gather of [2] float32" in each["mismatch inside"]
        assert "jax_program.py:" in each["mismatch inside"]
        assert "rank 0: broadcast of [700, 700] float32" in each["late"]
        assert each["between"] == each["after"] == 6.0


@pytest.mark.parametrize("place", ["inside", pytest.param("outside", marks=pytest.mark.long)])
@pytest.mark.parametrize(("manner", "said"), [("killed", "killed by SIGKILL"), ("raised", "ValueError: no more data")])
def test_the_launcher_names_the_rank_that_ended(manner: str, said: str, place: str) -> None:
    done = run(*LAUNCH, "2", HERE / "jax_faults.py", manner, place, fails=True)
    assert "rank 1" in done.stderr
    assert "failed first" in done.stderr
    assert said in done.stderr


ENDING = """
import signal, sys
import accelerate_cpp.accelerator  # before JAX: what it does at exit comes after what JAX does
import jax, jax.numpy as jnp
import accelerate_cpp.jax as ours

def far(a):
    for _ in range(10):
        a = jnp.tanh(a @ a)
    return a

ours.barrier()
if ours.rank() == 1:
    jax.jit(lambda a: ours.all_reduce(far(a)))(jnp.eye(700))
    raise ValueError("no more data")
signal.pause()
"""


def test_a_rank_that_fails_does_not_wait_for_what_it_has_left_under_way(tmp_path: Path) -> None:
    script = tmp_path / "ending.py"
    script.write_text(ENDING)
    done = run(*LAUNCH, "2", script, fails=True)
    assert "ValueError: no more data" in done.stderr
    assert "atexit" not in done.stdout + done.stderr  # nothing that JAX says of programs that ended with it


def wait_in_a_program(place: str) -> Any:
    """Rank 0 is interrupted while it waits for rank 1 in a collective."""
    import jax
    import jax.numpy as jnp

    import accelerate_cpp.jax as ours

    connect()
    x = jnp.ones(4)
    reduce = jax.jit(ours.all_reduce) if place == "inside" else ours.all_reduce
    jax.block_until_ready(reduce(x))
    meet("ready")
    if rank() == 0:
        own, seconds = interrupted(lambda: jax.block_until_ready(reduce(x)))
        tell("interrupted")
        meet("over")
        return own, seconds
    await_event("interrupted", 0)
    other = raised_by(lambda: jax.block_until_ready(reduce(x)))
    meet("over")
    return other


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_ctrl_c_ends_a_wait_inside_a_program_and_outside(place: str) -> None:
    (own, seconds), other = run_job(wait_in_a_program, 2, place)
    assert own.kind == "KeyboardInterrupt", own
    assert seconds < SOON
    assert "PeerLost" in (other.kind if place == "outside" else other.message), other
    assert "rank 0" in other.message


KERNEL = """
import sys, warnings
import jax, jax.numpy as jnp
from accelerate_cpp import notebook_launcher

def work():
    import accelerate_cpp.jax as ours
    return float(ours.all_reduce(jnp.ones(3) * (ours.rank() + 1)).sum())

if sys.argv[1] == "started":
    jnp.ones(3).sum()
warnings.simplefilter("error", RuntimeWarning)  # JAX's, of forks while its threads run
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", UserWarning)
    print(notebook_launcher(work, num_processes=2))
print([str(warning.message) for warning in caught])
"""


@pytest.mark.parametrize("kernel", [pytest.param("imported", marks=pytest.mark.long), "started"])
def test_workers_of_a_kernel_that_has_started_jax_come_from_the_helper_process(kernel: str) -> None:
    results, warned = run(sys.executable, "-c", KERNEL, kernel).stdout.splitlines()
    assert results == "[9.0, 9.0]"
    assert ("JAX has started its threads in this process" in warned) == (kernel == "started")
    assert ("from a helper process instead" in warned) == (kernel == "started")


@pytest.mark.long
def test_the_example_trains_alike_on_one_process_without_this_package_and_on_two(tmp_path: Path) -> None:
    run(sys.executable, EXAMPLES / "jax_digits_plain.py", "--metrics", tmp_path / "plain.json")
    run(*LAUNCH, "2", EXAMPLES / "jax_digits.py", "--metrics", tmp_path / "two.json")
    plain, two = (json.loads((tmp_path / name).read_text()) for name in ("plain.json", "two.json"))
    assert len(plain) == len(two) == 5
    for one, other in zip(plain, two, strict=True):
        assert abs(one["loss"] - other["loss"]) < 1e-5
        assert one["accuracy"] == other["accuracy"]
    assert two[-1]["accuracy"] > 0.95


def test_four_lines_take_the_example_to_several_processes() -> None:
    plain, ours = ((EXAMPLES / name).read_text().splitlines() for name in ("jax_digits_plain.py", "jax_digits.py"))
    new = [line[2:].strip() for line in difflib.ndiff(plain, ours) if line.startswith("+ ")]
    assert [line for line in new if line and not line.startswith(('"""', "report("))] == [
        "from accelerate_cpp import jax as processes",
        "rows = order[start : start + batch_size][processes.rank() :: processes.world_size()]",
        "gradients = processes.average_gradients(jax.grad(loss_of)(parameters, images, labels))",
        "if processes.is_main_process():",
    ]


def test_without_what_it_needs_the_package_says_how_to_get_it() -> None:
    missing = "import sys; sys.modules['jax'] = None; import accelerate_cpp.jax"
    assert "pip install 'accelerate-cpp[jax]'" in run(sys.executable, "-c", missing, fails=True).stderr
    unbuilt = (
        "import accelerate_cpp._native as native; native.xla_handlers = dict; "
        "import accelerate_cpp.jax as ours; ours.barrier()"
    )
    assert "accelerate-cpp rebuild --force" in run(sys.executable, "-c", unbuilt, fails=True).stderr
    moved = "from jax._src import effects; del effects.ordered_effects; import accelerate_cpp.jax"
    assert "pip install 'jax>=0.7.2,<0.11'" in run(sys.executable, "-c", moved, fails=True).stderr


@pytest.mark.long
def test_a_jaxlib_that_is_older_than_the_header_of_the_build_is_refused_with_the_command() -> None:
    refusing = (
        "import jax\n"
        "def refuse(*_, **__): raise RuntimeError('API version (0.3) is incompatible with (0.1)')\n"
        "jax.ffi.register_ffi_target = refuse\n"
        "import accelerate_cpp.jax as ours\n"
        "ours.barrier()"
    )
    error = run(sys.executable, "-c", refusing, fails=True).stderr
    assert "MissingLibrary" in error
    assert "accelerate-cpp rebuild --force" in error


def test_the_package_and_the_command_line_do_not_load_jax() -> None:
    code = (
        "import sys, accelerate_cpp, accelerate_cpp.accelerator, accelerate_cpp.launchers, "
        "accelerate_cpp.commands.accelerate_cli, accelerate_cpp.frameworks.loading; "
        "print([name for name in ('jax', 'jaxlib', 'tensorflow') if name in sys.modules])"
    )
    assert run(sys.executable, "-c", code).stdout == "[]\n"


EXAMPLES_OF_DOCSTRINGS = """
import doctest, sys
import accelerate_cpp.jax as ours
finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
for name in ours.__all__:
    (test,) = finder.find(getattr(ours, name), name, globs={})
    assert test.examples, name
    runner.run(test)
sys.exit(runner.summarize().failed)
"""


@pytest.mark.long
def test_the_examples_in_the_docstrings_print_what_they_show() -> None:
    run(sys.executable, "-c", EXAMPLES_OF_DOCSTRINGS)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_code_of_the_page_prints_what_the_page_shows(processes: int, tmp_path: Path) -> None:
    page = (HERE.parents[1] / "docs" / "jax.md").read_text()
    boxes = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(boxes) == 3
    script = tmp_path / "page.py"
    script.write_text("processes.print('next')\n".join(code for code, _ in boxes))
    launched = [sys.executable] if processes == 1 else [*LAUNCH, str(processes)]
    done = run(*launched, script, folder=tmp_path)
    assert done.stdout.split("next\n") == [shown for _, shown in boxes]


ALONE = """
import os, sys, tempfile
import jax, jax.numpy as jnp
import accelerate_cpp.jax as ours
x = jnp.arange(4.0)
assert (ours.all_reduce(x, "mean") == x).all() and ours.all_gather(x).shape == (1, 4)
assert (ours.reduce_scatter(x, tiled=True) == x).all() and (ours.broadcast(x) == x).all()
assert jax.jit(jax.grad(lambda a: (ours.all_reduce(a) ** 2).sum()))(x).tolist() == [0.0, 2.0, 4.0, 6.0]
ours.barrier()
"""


def test_one_process_without_a_launcher_is_a_group_of_one() -> None:
    run(sys.executable, "-c", ALONE)
