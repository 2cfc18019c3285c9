"""The examples: each is run by the command that their README gives, and does what it shows."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
FILES = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py")}
ROW = re.compile(r"\| \[(?P<name>[^\]]+\.py)\]\((?P<link>[^)]+)\) \| [^|]+ \| `(?P<command>[^`]+)` \|")
ROWS = [match for line in (EXAMPLES / "README.md").read_text().splitlines() if (match := ROW.fullmatch(line))]
COMMANDS = {match["name"]: shlex.split(match["command"]) for match in ROWS}
LAUNCH = [sys.executable, "-m", "accelerate_cpp.commands.launch"]


@dataclass(frozen=True)
class Example:
    """One file of examples/, which may write into ``folder``."""

    name: str
    folder: Path

    def start(self, *arguments: object, processes: int = 2) -> subprocess.CompletedProcess[str]:
        """Runs the documented command with some more arguments."""
        command = COMMANDS[self.name]
        assert command[:2] == ["accelerate-cpp", "launch"], command
        command = [*LAUNCH, "--num_cpu_threads_per_process", "1", *command[2:], *map(str, arguments)]
        command[command.index("--num_processes") + 1] = str(processes)
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)

    def run(self, *arguments: object, processes: int = 2) -> str:
        """The same; returns what was printed."""
        done = self.start(*arguments, processes=processes)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def found(name: str, output: str) -> list[float]:
    """Each number that was printed after ``name``."""
    return [float(text) for text in re.findall(rf"\b{name} (\d[\d.e+-]*)", output)]


def last_of(name: str, output: str) -> float:
    return found(name, output)[-1]


def trains_in_four_lines(example: Example) -> None:
    output = example.run()
    assert last_of("accuracy", output) >= 0.82
    assert len(set(found("on", output))) == 1, "each sample of the test set is counted once"


def goes_on_where_it_was_saved_and_logs(example: Example) -> None:
    whole = example.run("--output_dir", example.folder)
    assert last_of("accuracy", whole) >= 0.85
    assert set(logged(example)) == {"train_loss", "loss", "accuracy"}
    assert logged(example)["train_loss"] == list(range(1, int(last_of("steps", whole)) + 1))
    rest = example.run("--output_dir", example.folder, "--resume_from_checkpoint", example.folder / "step_30")
    assert rest.splitlines() == whole.splitlines()[1:], "the rest of epoch 2, and epoch 3"


def logged(example: Example) -> dict[str, list[int]]:
    """The steps of each value in the one file of events."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (events,) = (example.folder / Path(example.name).stem).glob("events*")
    reader = accumulator.EventAccumulator(str(events))
    reader.Reload()
    return {tag: [event.step for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def accumulates_what_one_large_batch_gives(example: Example) -> None:
    accumulated = example.run("--batch_size", 16, "--gradient_accumulation_steps", 4)
    at_once = example.run("--batch_size", 64, "--gradient_accumulation_steps", 1)
    assert found("loss", accumulated) == pytest.approx(found("loss", at_once), rel=1e-4)
    assert found("steps", accumulated) == found("steps", at_once) == [16, 32, 48]
    assert last_of("accuracy", accumulated) >= 0.95


def takes_as_many_samples_per_step_as_would_have_fit(example: Example) -> None:
    halved, fits = example.run(), example.run("--pretended_limit", 64)
    assert halved.splitlines()[-1] == "batch size 16, 4 batches per step"
    assert fits.splitlines()[-1] == "batch size 64, 1 batches per step"
    assert found("loss", halved) == pytest.approx(found("loss", fits), rel=1e-4)


def two_processes_that_accumulate_train_as_one_on_large_batches(example: Example) -> None:
    two = example.run("--batch_size", 8, "--gradient_accumulation_steps", 4)
    one = example.run("--batch_size", 64, "--gradient_accumulation_steps", 1, processes=1)
    assert found("loss", two) == pytest.approx(found("loss", one), rel=1e-5)
    assert found("token,", two) == found("token,", one)
    assert last_of("loss", two) < 0.8


def processes_part_and_meet_again(example: Example) -> None:
    output = example.run()
    assert min(found("differ by", output)) > 1e-4
    assert found("average, by", output) == [0.0, 0.0, 0.0]
    assert last_of("accuracy", output) >= 0.95


def compresses_gradients(example: Example) -> None:
    plain, bf16, low_rank = (
        found("loss", example.run("--ddp_comm_hook", hook)) for hook in ("no", "bf16", "power_sgd")
    )
    assert len({plain[-1], bf16[-1], low_rank[-1]}) == 3, "what was sent differs"
    assert bf16 == pytest.approx(plain, rel=0.01)
    assert low_rank == pytest.approx(plain, rel=0.2)


def goes_on_where_it_was(example: Example) -> None:
    whole = example.run("--output_dir", example.folder).splitlines()
    numbers = {path.name for path in (example.folder / "checkpoints").iterdir()}
    assert numbers == {f"checkpoint_{number}" for number in range(4)}, "every 10 of 48 steps"
    for lost in ("checkpoint_2", "checkpoint_3"):
        (example.folder / "checkpoints" / lost).rename(example.folder / lost)
    resumed, *rest = example.run("--output_dir", example.folder).splitlines()
    assert resumed == "resumed after 20 steps, in epoch 2"
    assert rest == whole[1:]
    assert last_of("accuracy", whole[-1]) >= 0.85


def one_process_stops_all(example: Example) -> None:
    output = example.run()
    steps, waited = (json.loads(text) for text in re.findall(r"\[.*?\]", output))
    assert len(set(steps)) == 1
    assert steps[0] < last_of("at most", output)
    assert sorted(waited)[0] < 8 == sorted(waited)[1], "only one of them had seen enough"


def finds_a_size_that_fits_on_all_processes(example: Example) -> None:
    output = example.run()
    assert output.splitlines()[-1] == "batch sizes tried: [64, 57]"
    assert last_of("accuracy", output) >= 0.95


def counts_each_sample_once(example: Example) -> None:
    output = example.run()
    assert "gather: 600 samples; gather_for_metrics: 507 and 507" in output
    together, alone = re.findall(r"(\d+) on", output)
    assert together == alone
    assert last_of("accuracy", output) >= 0.95


def networks_predict_together(example: Example) -> None:
    output = example.run()
    assert found("on", output) == [500, 500, 500]
    average, together = re.findall(r"(0\.\d+) by", output)
    assert 0.85 <= float(average) <= float(together)


def each_process_writes_what_took_the_time(example: Example) -> None:
    output = example.run("--output_trace_dir", example.folder, "--rows", "100")
    assert re.search(r"Optimizer.step#AdamW.step .* 5 *\n", output), "a row of the table, with 5 calls"
    for rank in range(2):
        events = json.loads((example.folder / f"profile_{rank}.json").read_text())["traceEvents"]
        assert sum(event.get("name") == "aten::embedding_bag" for event in events) == 5


def says_what_is_missing_or_trains(example: Example) -> None:
    if importlib.util.find_spec("schedulefree"):
        assert last_of("accuracy", example.run()) >= 0.85
        return
    done = example.start()
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == "schedule_free.py needs the library schedulefree: pip install schedulefree"


CHECKS: dict[str, Callable[[Example], None]] = {
    "nlp_example.py": trains_in_four_lines,
    "cv_example.py": trains_in_four_lines,
    "complete_nlp_example.py": goes_on_where_it_was_saved_and_logs,
    "complete_cv_example.py": goes_on_where_it_was_saved_and_logs,
    "by_feature/gradient_accumulation.py": accumulates_what_one_large_batch_gives,
    "by_feature/automatic_gradient_accumulation.py": takes_as_many_samples_per_step_as_would_have_fit,
    "by_feature/gradient_accumulation_for_autoregressive_models.py": (
        two_processes_that_accumulate_train_as_one_on_large_batches
    ),
    "by_feature/local_sgd.py": processes_part_and_meet_again,
    "by_feature/ddp_comm_hook.py": compresses_gradients,
    "by_feature/checkpointing.py": goes_on_where_it_was,
    "by_feature/early_stopping.py": one_process_stops_all,
    "by_feature/memory.py": finds_a_size_that_fits_on_all_processes,
    "by_feature/multi_process_metrics.py": counts_each_sample_once,
    "by_feature/cross_validation.py": networks_predict_together,
    "by_feature/profiler.py": each_process_writes_what_took_the_time,
    "by_feature/schedule_free.py": says_what_is_missing_or_trains,
}
CHECKED_ELSEWHERE = {
    "by_feature/tracking.py": "test_tracking.py",
    "digits.py": "test_examples.py",
    "digits_plain.py": "test_examples.py",
    "show_digits.py": "test_examples.py",
    "jax_digits.py": "test_jax.py",
    "jax_digits_plain.py": "test_jax.py",
    "keras_digits.py": "test_tensorflow.py",
    "keras_digits_plain.py": "test_tensorflow.py",
    "tensorflow_digits.py": "test_tensorflow.py",
    "tensorflow_digits_plain.py": "test_tensorflow.py",
}
# In plain PyTorch, with what they are compared with. plain.py is the training that the other examples start from.
PLAIN = {
    "nlp_example_plain.py": "nlp_example.py",
    "cv_example_plain.py": "cv_example.py",
    "by_feature/gradient_accumulation_plain.py": "by_feature/gradient_accumulation.py",
    "by_feature/gradient_accumulation_for_autoregressive_models_plain.py": (
        "by_feature/gradient_accumulation_for_autoregressive_models.py"
    ),
    "by_feature/checkpointing_plain.py": "by_feature/checkpointing.py",
    "by_feature/cross_validation_plain.py": "by_feature/cross_validation.py",
    "by_feature/tracking_plain.py": "by_feature/tracking.py",
    "by_feature/plain.py": "by_feature/ddp_comm_hook.py",
}
WITHOUT_COMPRESSION = ("--ddp_comm_hook", "no")
NOT_LONG = (
    "nlp_example.py",
    "by_feature/gradient_accumulation_for_autoregressive_models.py",
    "by_feature/checkpointing.py",
    "by_feature/multi_process_metrics.py",
)


RUN_HERE = [
    pytest.param(name, marks=() if name in NOT_LONG else pytest.mark.long)
    for name in sorted(FILES - CHECKED_ELSEWHERE.keys() - PLAIN.keys())
]


@pytest.mark.parametrize("name", RUN_HERE)
@pytest.mark.long
def test_the_example_does_what_it_shows(name: str, tmp_path: Path) -> None:
    assert name in CHECKS, "what does this example show? Add a function that checks it to CHECKS"
    CHECKS[name](Example(name, tmp_path))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in PLAIN])
def test_on_one_process_the_example_prints_what_its_twin_in_plain_torch_prints(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    alone = [sys.executable, str(EXAMPLES / name)]
    plain = subprocess.run(alone, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert plain.returncode == 0, plain.stderr
    command = [*LAUNCH, "--cpu", "--num_cpu_threads_per_process", "1", str(EXAMPLES / PLAIN[name])]
    command += WITHOUT_COMPRESSION if name == "by_feature/plain.py" else ()
    ours = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ours.returncode == 0, ours.stderr
    assert re.findall(r"[a-z]+", ours.stdout) == re.findall(r"[a-z]+", plain.stdout)
    printed = [[float(number) for number in re.findall(r"\d[\d.e-]*", text)] for text in (ours.stdout, plain.stdout)]
    assert printed[0] == pytest.approx(printed[1], rel=1e-4)
    assert printed[1]


def test_each_example_is_checked() -> None:
    assert CHECKS.keys() | CHECKED_ELSEWHERE.keys() | PLAIN.keys() == FILES
    for name, test in CHECKED_ELSEWHERE.items():
        assert Path(name).name in (Path(__file__).parent / test).read_text()


def test_the_table_has_a_row_with_its_command_for_each_example() -> None:
    assert sorted(match["name"] for match in ROWS) == sorted(FILES)
    assert all(match["link"] == match["name"] for match in ROWS)
    assert all(f"examples/{name}" in COMMANDS[name] for name in FILES - {"show_digits.py"})


def test_examples_are_short() -> None:
    """All that a reader learns from; show_digits.py only draws the demo's picture."""
    learned_from = FILES - {"show_digits.py"}
    assert {name for name in learned_from if len((EXAMPLES / name).read_text().splitlines()) > 120} == set()


def test_what_several_examples_define_is_the_same_in_all_of_them() -> None:
    """Each can be copied by itself, and who has read one has read much of the next."""
    texts: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name in CHECKS.keys() | {"by_feature/tracking.py"}:
        for node in ast.parse((EXAMPLES / name).read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in {"load_data", "evaluate", "Progress"}:
                arguments = ast.unparse(node.args) if isinstance(node, ast.FunctionDef) else ""
                texts[node.name, arguments].add(ast.unparse(node))
    assert set(texts) == {
        ("load_data", "samples, seed"),
        ("load_data", ""),
        ("evaluate", "accelerator, model, loader"),
        ("Progress", ""),
    }
    assert {key: len(versions) for key, versions in texts.items() if len(versions) > 1} == {}
