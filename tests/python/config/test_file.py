"""The configuration file: where it lies, what may stand in it, what becomes of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from accelerate_cpp.config import file
from accelerate_cpp.errors import InvalidArgument, MissingFile, Unavailable


def written(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HF_HOME": "/a", "XDG_CACHE_HOME": "/b"}, "/a/accelerate"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/huggingface/accelerate"),
        ({}, str(Path("~/.cache/huggingface/accelerate").expanduser())),
    ],
)
def test_the_file_lies_where_that_of_the_original_does(environ: dict[str, str], folder: str) -> None:
    assert file.default_path(environ) == Path(folder) / "default_config.yaml"


def test_a_file_in_json_is_taken_where_there_is_no_other(tmp_path: Path) -> None:
    environ = {"HF_HOME": str(tmp_path)}
    assert file.find(None, environ) is None
    (tmp_path / "accelerate").mkdir()
    written(tmp_path / "accelerate", '{"distributed_type": "NO"}', "default_config.json")
    found = file.find(None, environ)
    assert found is not None
    assert found.path.name == "default_config.json"
    written(tmp_path / "accelerate", "distributed_type: MULTI_CPU", "default_config.yaml")
    assert file.default_path(environ).name == "default_config.yaml"


def test_what_a_file_leaves_out_has_a_default(tmp_path: Path) -> None:
    values = file.load(written(tmp_path, "distributed_type: 'NO'\nmixed_precision: bf16\n")).values
    assert (values["num_processes"], values["mixed_precision"], values["rdzv_backend"]) == (1, "bf16", "static")
    assert file.load(written(tmp_path, "distributed_type: MULTI_GPU\n")).values["num_processes"] == -1


def test_an_unquoted_no_is_read_as_it_is_meant(tmp_path: Path) -> None:
    given = file.load(written(tmp_path, "distributed_type: NO\nmixed_precision: no\n")).given
    assert given == {"distributed_type": "NO", "mixed_precision": "no"}


def test_files_of_early_versions_are_understood(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nfp16: true\ndynamo_backend: INDUCTOR\n"
    given = file.load(written(tmp_path, text)).given
    assert given["mixed_precision"] == "fp16"
    assert given["dynamo_config"] == {"dynamo_backend": "INDUCTOR"}
    assert file.load(written(tmp_path, "distributed_type: 'NO'\ndynamo_backend: 'NO'")).given["dynamo_config"] == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("distributed_type: 'NO'\nnum_proceses: 2", "unknown key num_proceses; the nearest known key is num_processes"),
        ("mixed_precision: 'no'", "distributed_type is missing"),
        ("distributed_type: MULTI", "distributed_type: 'MULTI': expected one of NO, MULTI_CPU"),
        (
            "distributed_type: 'NO'\nnum_processes: two",
            "num_processes: 'two': expected an integer; it means: processes",
        ),
        ("distributed_type: 'NO'\nnum_processes: true", "expected an integer"),
        ("distributed_type: 'NO'\nuse_cpu: maybe", "use_cpu: 'maybe': expected true or false"),
        ("distributed_type: 'NO'\nfp8_config: 5", "fp8_config: 5: expected a section"),
        ("distributed_type: 'NO'\ngpu_ids: [0]", "expected a string"),
        ("- 1\n- 2", "expected keys and values, found list"),
        ("a: [", "cannot be read as YAML"),
        ("compute_environment: AMAZON_SAGEMAKER", "SageMaker container"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        file.load(written(tmp_path, text))
    assert words in str(refused.value)
    assert "config.yaml" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_file_and_one_that_is_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match=r"absent\.yaml: cannot be read .* config default"):
        file.load(tmp_path / "absent.yaml")
    with pytest.raises(InvalidArgument, match=r"c\.json cannot be read as JSON"):
        file.load(written(tmp_path, "{", "c.json"))
    for name in ("c.json", "c.yaml"):
        with pytest.raises(InvalidArgument, match=rf"{name} cannot be read as (JSON|YAML): .* nested more deeply"):
            file.load(written(tmp_path, "[" * 100_000, name))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(InvalidArgument, match=r"bytes\.yaml: cannot be read"):
        file.load(tmp_path / "bytes.yaml")
    with pytest.raises(Unavailable, match="Is a directory"):
        file.load(tmp_path)


@pytest.mark.parametrize("name", ["c.yaml", "c.json"])
def test_what_is_saved_is_sorted_and_read_again(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new" / name
    values = {"num_processes": 2, "distributed_type": "MULTI_CPU", "fp8_config": {}, "gpu_ids": None}
    file.save(path, values)
    assert file.load(path).given == {"distributed_type": "MULTI_CPU", "num_processes": 2}
    assert path.read_text().index("distributed_type") < path.read_text().index("num_processes")
    assert (name == "c.json") == path.read_text().startswith("{")
    assert [entry.name for entry in path.parent.iterdir()] == [name]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "old")

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        file.replace_text(path, json.dumps({}))
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("name", ["tpu_env", "commands"])
@pytest.mark.parametrize("value", ["{HF_TOKEN: s3cr3t}", "[A=1, {HF_TOKEN: s3cr3t}]", "[[s3cr3t]]", "[A=1, 7]", "true"])
def test_lines_for_a_pod_are_texts_and_refused_without_them(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        file.load(written(tmp_path, f"distributed_type: XLA\n{name}: {value}\n"))
    assert f"config.yaml: {name}: expected a text or a list of texts, found " in str(refused.value)
    assert "s3cr3t" not in str(refused.value)


def test_one_line_for_a_pod_is_a_list_of_one(tmp_path: Path) -> None:
    given = file.load(written(tmp_path, "distributed_type: XLA\ntpu_env: A=1\ncommands: [ls, pwd]\n")).given
    assert (given["tpu_env"], given["commands"]) == (["A=1"], ["ls", "pwd"])


def test_a_link_at_the_name_of_a_file_that_is_being_written_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, target = tmp_path / "report.json", tmp_path / "target"
    target.write_text("kept")
    (tmp_path / f".report.json.tmp-{os.getpid()}").symlink_to(target)  # which others can guess
    file.replace_text(path, "new")
    assert (path.read_text(), path.is_symlink(), target.read_text()) == ("new", False, "kept")
    monkeypatch.setattr(file.secrets, "token_hex", lambda size: "known")
    (tmp_path / ".report.json.tmp-known").symlink_to(target)
    with pytest.raises(FileExistsError):
        file.replace_text(path, "newer")
    assert (path.read_text(), target.read_text()) == ("new", "kept")


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """As root, a report for ``/dev/null`` would otherwise take the device away from all programs."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(OSError, match="it is no file"):
            file.replace_text(path, "new")
    with pytest.raises(IsADirectoryError):
        file.replace_text(tmp_path, "new")
    assert {(entry.name, entry.is_symlink()) for entry in tmp_path.iterdir()} == {("pipe", False), ("link", True)}
    assert pipe.is_fifo()


def test_a_written_file_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        file.replace_text(tmp_path / "a.json", "ä")
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "a.json").read_bytes() == "ä".encode()
