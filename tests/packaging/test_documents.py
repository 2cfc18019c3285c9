"""The documents do what they say: their code runs and prints what they show, and their commands exist.

The blocks of a page share one namespace and one folder. A Python block that begins with the comment ``# name.py`` is
saved under that name. A box of text after a block of code or of commands is what that block prints, where ``…`` stands
for anything, and decimal fractions may differ a little.
"""

from __future__ import annotations

import doctest
import inspect
import io
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

import accelerate_cpp
from accelerate_cpp.accelerator import Accelerator
from accelerate_cpp.commands.accelerate_cli import COMMANDS
from accelerate_cpp.runtime import preemption
from accelerate_cpp.state import AcceleratorState, GradientState

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
EXAMPLES = REPOSITORY / "examples"
sys.path.insert(0, str(DOCS))
import command_reference  # noqa: E402
import example_gallery  # noqa: E402

GUIDES = (
    *("quicktour", "accumulation", "checkpoints", "precision", "parallelism", "model_parallelism", "planning"),
    *("megatron", "deepspeed", "trackers", "notebooks", "machines", "devices"),
)
PAGES = [*REPOSITORY.glob("*.md"), *sorted(DOCS.glob("*.md")), EXAMPLES / "README.md"]
BOX = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+\.\d+")


@dataclass(frozen=True)
class Block:
    """A box of a page, and the text that the page shows as its output."""

    line: int
    language: str
    text: str
    shown: str | None

    @property
    def file(self) -> str | None:
        """The name under which a reader saves it, if any."""
        first = re.match(r"# ([\w.]+\.py)\n", self.text)
        return first[1] if first and self.language == "python" else None


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = list(BOX.finditer(text))
    result: list[Block] = []
    for box, after in zip_longest(found, found[1:]):
        adjacent = after is not None and after["language"] == "text" and not text[box.end() : after.start()].strip()
        shown = after["text"] if after is not None and adjacent else None
        result.append(Block(text.count("\n", 0, box.start()) + 1, box["language"], box["text"], shown))
    return result


def check_output(printed: str, block: Block, page: Path) -> None:
    """Fails unless ``printed`` is what the page shows."""
    assert block.shown is not None
    shown_numbers, numbers = NUMBER.findall(block.shown), NUMBER.findall(printed)
    pattern = re.escape(NUMBER.sub("#", block.shown).strip()).replace("…", ".*")
    message = f"{page.name}:{block.line} prints\n{printed}\nand shows\n{block.shown}"
    assert re.fullmatch(pattern, NUMBER.sub("#", printed).strip(), re.DOTALL), message
    if "…" not in block.shown:
        close = (
            math.isclose(float(one), float(other), rel_tol=0.05, abs_tol=0.03)
            for one, other in zip(numbers, shown_numbers, strict=True)
        )
        assert all(close), message


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty folder to work in, and no session of another test before or after."""
    import torch

    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    random = torch.get_rng_state()
    handlers = {number: signal.getsignal(number) for number in preemption.NOTICES}
    monkeypatch.setattr(preemption, "_is_listening", False)  # again, when an example has asked for notices
    _forget()
    yield tmp_path
    _forget()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_rng_state(random)


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("name", GUIDES)
def test_code_of_a_page_runs_and_prints_what_the_page_shows(name: str, fresh: Path) -> None:
    page = DOCS / f"{name}.md"
    code = [block for block in blocks(page) if block.language == "python" and block.file is None]
    assert code
    namespace: dict[str, Any] = {"__name__": name}
    for block in code:
        printed = io.StringIO()
        with redirect_stdout(printed), redirect_stderr(io.StringIO()):
            exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
        if block.shown is not None:
            check_output(printed.getvalue(), block, page)
        else:
            assert printed.getvalue() == "", f"{page.name}:{block.line}: show what it prints"


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in GUIDES if any(b.file for b in blocks(DOCS / f"{name}.md"))])
def test_commands_of_a_page_print_what_the_page_shows(name: str, fresh: Path) -> None:
    """Those that are followed by their output, in a folder with the files that the page says to save."""
    page = DOCS / f"{name}.md"
    for block in blocks(page):
        if block.file is not None:
            (fresh / block.file).write_text(block.text)
    run = [block for block in blocks(page) if block.language == "bash" and block.shown is not None]
    assert run
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for block in run:
        done = subprocess.run(["bash", "-ec", block.text], capture_output=True, text=True, env=environment, cwd=fresh)
        assert done.returncode == 0, done.stderr
        check_output(done.stdout, block, page)


def commands(page: Path) -> Iterator[tuple[int, list[str]]]:
    """Each ``accelerate-cpp …`` in the boxes of a page, without what stands before it; to pip it is a package."""
    for block in blocks(page):
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removesuffix(" &"), comments=True)
                if "accelerate-cpp" in words and words[0] != "pip":
                    yield block.line, words[words.index("accelerate-cpp") + 1 :]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_commands_of_a_page_are_accepted_by_their_parsers(page: Path) -> None:
    parsers = command_reference.parsers()
    for line, (name, *arguments) in commands(page):
        if name.startswith("--"):
            continue
        assert name in parsers, f"{page.name}:{line}: {name}"
        try:
            parsers[name].parse_args(arguments)
        except SystemExit:
            pytest.fail(f"{page.name}:{line}: accelerate-cpp {shlex.join([name, *arguments])}")


def test_pages_with_commands_are_found() -> None:
    assert sum(1 for page in PAGES for _ in commands(page)) >= 40


def test_every_command_has_an_example_and_its_flags_on_the_page_of_the_command_line() -> None:
    page = DOCS / "cli.md"
    names = [name for name, *_ in COMMANDS]
    assert re.findall(r"^## (\S+)$", page.read_text(), re.MULTILINE) == sorted(names, key=_place_of_command)
    assert sorted({arguments[0] for _, arguments in commands(page)}) == sorted(names)
    assert sorted(command_reference.PLACE.findall(page.read_text())) == sorted(names)


def _place_of_command(name: str) -> tuple[bool, str]:
    return name != "launch", name


@pytest.mark.parametrize("command", [name for name, *_ in COMMANDS])
def test_every_flag_is_in_the_reference(command: str) -> None:
    parser = command_reference.parsers()[command]
    shown = command_reference.markdown(command)
    for one in (parser, *command_reference.nested(parser).values()):
        for action in one._actions:
            for flag in action.option_strings:
                if flag not in ("-h", "--help") and "-" not in flag[2:]:
                    assert re.search(rf"^````{{option}} (-\w, )?{flag}\b", shown, re.MULTILINE), flag


def test_the_reference_shows_choices_and_defaults() -> None:
    shown = command_reference.markdown("check")
    assert "{option} --mixed_precision {no,fp16,bf16,fp8}" in shown
    assert re.search(r"{option} --steps N\n.*default: 2$", shown, re.MULTILINE)
    assert "default: `float32 float16 int8 int4`" in command_reference.markdown("estimate-memory")


def test_every_example_is_in_the_gallery() -> None:
    shown = example_gallery.markdown()
    files = sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py"))
    assert [name for name in files if shown.count(f"<summary>all of {name}</summary>") != 1] == []
    trained = [name for name in files if example_gallery.twin_of(name) and not example_gallery.is_plain(name)]
    assert shown.count("````diff\n") == len(trained) >= 17
    assert "\n+     accelerator = Accelerator(mixed_precision=args.mixed_precision)  # 2\n" in shown


def test_every_page_has_its_place_in_a_table_of_contents() -> None:
    index = (DOCS / "index.md").read_text()
    trees = re.findall(r"^```{toctree}\n(.*?)^```", index, re.DOTALL | re.MULTILINE)
    entries = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    listed: set[Path] = set()
    for entry in entries:
        name = re.sub(r"^.*<(.*)>$", r"\1", entry)
        matches = list(DOCS.glob(name)) if "*" in name else [DOCS / name]
        listed |= {path.resolve().with_suffix("") if "*" in name else path.resolve() for path in matches}
    pages = {path.with_suffix("") for kind in ("md", "rst") for path in DOCS.rglob(f"*.{kind}")} - {DOCS / "index"}
    pages |= {path.with_suffix("") for path in (REPOSITORY / "notebooks").glob("*.ipynb")}
    # A name such as quickstart.es has a dot of its own.
    missing = {page for page in pages if page not in listed and not any(str(page) == str(one) for one in listed)}
    assert sorted(str(page.relative_to(REPOSITORY)) for page in missing) == []


def examples() -> Iterator[tuple[str, Any]]:
    """The public methods of ``Accelerator`` that do something here, and the package's public functions."""
    for name, value in vars(Accelerator).items():
        function = value.__func__ if isinstance(value, staticmethod) else value
        if inspect.isfunction(function) and not name.startswith("_"):
            yield f"Accelerator.{name}", function
    for name in accelerate_cpp.__all__:
        if inspect.isfunction(value := getattr(accelerate_cpp, name)):
            yield name, value


def example_of(function: Any) -> str | None:
    """The part of a docstring below ``Example:``; ``None`` for what is refused."""
    text = inspect.getdoc(function) or ""
    if text.startswith("Not supported: raises"):
        return None
    _, _, example = text.partition("\nExample:\n")
    return example


EXAMPLES_OF = dict(examples())
STARTS_PROCESSES = re.compile(r">>>.*(?:debug|notebook)_launcher\(")


def _marks(function: Any) -> tuple[pytest.MarkDecorator, ...]:
    """Most examples take milliseconds; those that start processes add up."""
    return (pytest.mark.long,) if STARTS_PROCESSES.search(function.__doc__ or "") else ()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=_marks(EXAMPLES_OF[name]))
        for name in EXAMPLES_OF
        if example_of(EXAMPLES_OF[name]) is not None
    ],
)
def test_the_example_of_a_function_prints_what_its_docstring_shows(name: str, fresh: Path) -> None:
    function = EXAMPLES_OF[name]
    example = example_of(function)
    assert example, "add an example to the docstring"
    test = doctest.DocTestParser().get_doctest(example, {}, name, inspect.getsourcefile(function), 0)
    report = io.StringIO()
    result = doctest.DocTestRunner(verbose=False).run(test, out=report.write)
    assert result.attempted > 1
    assert result.failed == 0, report.getvalue()


def test_every_public_method_and_function_has_an_example() -> None:
    assert len(EXAMPLES_OF) > 70
    assert [name for name, function in EXAMPLES_OF.items() if example_of(function) == ""] == []
    refused = [name for name, function in EXAMPLES_OF.items() if example_of(function) is None]
    assert refused == ["Accelerator.lomo_backward"]
