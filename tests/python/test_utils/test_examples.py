"""Which features a long example lacks."""

from __future__ import annotations

from pathlib import Path

import accelerate.test_utils.examples as original
import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.test_utils.examples import compare_against_test

PLAIN = ["    model.train()", "    print('done')"]


def script(path: Path, training: list[str], main: list[str]) -> Path:
    lines = ["import torch", "", "def training_function(config, args):", *training, "", "def main():", *main, ""]
    path.write_text("\n".join([*lines, "if __name__ == '__main__':", "    main()", ""]))
    return path


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """The long script, one of a feature, and the plain one."""
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path)
    plain = script(tmp_path / "examples" / "nlp_example.py", PLAIN, ["    parse()"])
    feature = ["    # New code", "    log()", "", "    if args.log:", "        log(1)", *PLAIN]
    return (
        script(tmp_path / "complete.py", ["    if args.log:", "        log()", *PLAIN], ["    parse()"]),
        script(tmp_path / "feature.py", feature, ["    parse()", "    add('--log')", "    parse()"]),
        plain,
    )


@pytest.mark.parametrize(
    ("parser_only", "missing"), [(False, ["    log()\n", "        log(1)\n"]), (True, ["    add('--log')\n"])]
)
def test_lines_that_the_long_script_lacks_are_found(
    scripts: tuple[Path, Path, Path], parser_only: bool, missing: list[str]
) -> None:
    complete, feature, plain = scripts
    assert compare_against_test(complete, feature, parser_only) == missing
    assert compare_against_test(str(complete), str(feature), parser_only, str(plain)) == missing
    assert original.compare_against_test(complete, feature, parser_only) == missing


def test_a_script_lacks_nothing_of_itself(scripts: tuple[Path, Path, Path]) -> None:
    complete, feature, _ = scripts
    assert compare_against_test(feature, feature, False) == []
    assert compare_against_test(complete, feature, False, feature) == []


def test_the_last_line_counts(scripts: tuple[Path, Path, Path], tmp_path: Path) -> None:
    ending = script(tmp_path / "ending.py", [*PLAIN, "    end()"], ["    parse()"])
    assert compare_against_test(scripts[0], ending, False) == ["    end()\n"]


def test_a_script_without_the_function_is_refused(scripts: tuple[Path, Path, Path], tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("def main():\n    pass\n")
    with pytest.raises(InvalidArgument, match=r"other\.py: expected a function training_function"):
        compare_against_test(tmp_path / "other.py", scripts[1], False)
