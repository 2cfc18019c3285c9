"""Configurations as objects: read and written as the original does."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import accelerate.commands.config.config_args as original
import pytest
import yaml

import accelerate_cpp.commands.config
from accelerate_cpp.commands import config_args
from accelerate_cpp.commands.config_args import (
    BaseConfig,
    ClusterConfig,
    SageMakerConfig,
    load_config_from_file,
)
from accelerate_cpp.errors import InvalidArgument

CLUSTER = [
    "distributed_type: 'NO'\nmixed_precision: bf16\nuse_cpu: true\n",
    "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: 0,1\n",
    "distributed_type: MULTI_GPU\nfp16: true\nnum_processes: 3\ndynamo_backend: inductor\n",
    "distributed_type: 'NO'\nmixed_precision: fp8\ndynamo_backend: 'NO'\nfp8_config:\n  backend: TE\n",
    "distributed_type: FSDP\nmixed_precision: 'no'\nnum_processes: 4\nfsdp_config:\n  fsdp_version: 2\n",
]
SAGEMAKER = (
    "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\nmixed_precision: fp16\n"
    "ec2_instance_type: ml.p3\niam_role_name: me\nuse_cpu: false\ndebug: false\nnum_machines: 2\n"
)


def written(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", [*CLUSTER, SAGEMAKER])
def test_files_are_read_as_by_the_original(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    ours, theirs = load_config_from_file(str(path)), original.load_config_from_file(str(path))
    assert type(ours).__name__ == type(theirs).__name__
    assert asdict(ours) == asdict(theirs)
    assert ours.to_dict() == theirs.to_dict()


@pytest.mark.parametrize("text", [*CLUSTER, SAGEMAKER])
@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_what_is_written_is_read_again_by_both(tmp_path: Path, text: str, kind: str) -> None:
    config = load_config_from_file(written(tmp_path, text))
    path = tmp_path / "folder" / f"again.{kind}"
    getattr(config, f"to_{kind}_file")(path)
    content = json.loads(path.read_text()) if kind == "json" else yaml.safe_load(path.read_text())
    assert content == config.to_dict()
    for module in (config_args, original):
        cls: Any = getattr(module, type(config).__name__)
        assert getattr(cls, f"from_{kind}_file")(str(path)).to_dict() == config.to_dict()
    assert load_config_from_file(path) == config


def test_the_texts_written_are_those_of_the_original(tmp_path: Path) -> None:
    path = written(tmp_path, CLUSTER[2])
    for module, folder in ((config_args, tmp_path / "ours"), (original, tmp_path / "theirs")):
        folder.mkdir()
        config: Any = module.load_config_from_file(str(path))
        config.to_yaml_file(folder / "c.yaml")
        config.to_json_file(folder / "c.json")
    for name in ("c.yaml", "c.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()


@pytest.mark.parametrize("name", ["BaseConfig", "ClusterConfig", "SageMakerConfig"])
def test_classes_have_the_fields_and_the_methods_of_the_original(name: str) -> None:
    ours, theirs = getattr(config_args, name), getattr(original, name)
    assert [(field.name, field.default) for field in fields(ours)] == [
        (field.name, field.default) for field in fields(theirs)
    ]
    for method in ("from_json_file", "from_yaml_file", "process_config", "to_dict", "to_json_file", "to_yaml_file"):
        parameters = [inspect.signature(getattr(cls, method)).parameters for cls in (ours, theirs)]
        assert list(parameters[0]) == list(parameters[1])


def test_texts_become_kinds_and_sections_are_dicts() -> None:
    config = ClusterConfig("LOCAL_MACHINE", "MULTI_GPU", "no", False, False)  # type: ignore[arg-type]
    assert config.distributed_type is config_args.DistributedType.MULTI_GPU
    assert config.compute_environment is config_args.ComputeEnvironment.LOCAL_MACHINE
    assert (config.fsdp_config, config.dynamo_config, config.num_processes) == ({}, {}, -1)
    assert asdict(config) == asdict(original.ClusterConfig("LOCAL_MACHINE", "MULTI_GPU", "no", False, False))
    with pytest.raises(ValueError, match="SEVERAL"):
        ClusterConfig("LOCAL_MACHINE", "SEVERAL", "no", False, False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [
        {"distributed_type": "NO"},
        {"distributed_type": "NO", "fp16": True, "x": None},
        {"distributed_type": "NO", "dynamo_backend": "inductor", "use_cpu": True},
        {"distributed_type": "MULTI_GPU", "dynamo_backend": "NO", "num_processes": 2, "mixed_precision": "bf16"},
    ],
)
def test_keys_of_early_versions_and_defaults_are_filled_in(content: dict[str, Any]) -> None:
    before = dict(content)
    assert BaseConfig.process_config(content) == original.BaseConfig.process_config(dict(content))
    assert content == before


def test_a_job_of_sagemaker_has_no_number_of_processes(tmp_path: Path) -> None:
    path = written(tmp_path, SAGEMAKER.replace("DATA_PARALLEL", "'NO'"))
    config = load_config_from_file(path)
    assert isinstance(config, SageMakerConfig)
    assert config.distributed_type is config_args.SageMakerDistributedType.NO


def test_a_no_without_quotes_is_a_word(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(SAGEMAKER.replace("DATA_PARALLEL", "NO").replace("fp16", "no"))
    config = load_config_from_file(path)
    assert (config.distributed_type, config.mixed_precision) == (config_args.SageMakerDistributedType.NO, "no")
    assert ClusterConfig.process_config({"distributed_type": False})["distributed_type"] == "NO"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: MULTI_GPU\nnum_procesess: 1\n", "unknown key num_procesess; the nearest .* num_processes"),
        (SAGEMAKER + "regoin: x\n", "unknown key regoin; the nearest known key is region"),
        ("mixed_precision: fp16\n", "distributed_type is missing"),
        ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\n", "ec2_instance_type, iam_role_name"),
        ("compute_environment: AMAZON_SAGEMAKER\n", "distributed_type is missing"),
        ("distributed_type: MULTI_GPU\nnum_processes: two\n", "expected an integer"),
        ("- a\n", "expected keys and values"),
    ],
)
def test_files_that_say_something_else_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        load_config_from_file(written(tmp_path, text))


def test_a_missing_file_is_told_with_what_writes_one(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgument, match=r"none\.yaml: cannot be read.*`accelerate-cpp config default` writes one"
    ):
        load_config_from_file(tmp_path / "none.yaml")


def test_without_a_name_the_file_of_launches_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    place = tmp_path / "accelerate" / "default_config.yaml"
    assert (config_args.default_config_file, config_args.cache_dir) == (str(place), str(place.parent))
    place.parent.mkdir()
    place.write_text(CLUSTER[0])
    for config in (load_config_from_file(None), ClusterConfig.from_yaml_file(), ClusterConfig.from_json_file()):
        assert config.mixed_precision == "bf16"
    with pytest.raises(AttributeError, match="no_such_name"):
        config_args.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    "line",
    [
        "from accelerate_cpp.commands.config import default_config_file, load_config_from_file",
        "from accelerate_cpp.commands.config.config_args import default_config_file, load_config_from_file",
        "import accelerate_cpp.commands.config.config_args as a; default_config_file = a.default_config_file",
        "import accelerate_cpp.compat; from accelerate.commands.config.config_args import default_config_file",
    ],
)
def test_they_are_where_the_original_has_them_and_load_no_torch(tmp_path: Path, line: str) -> None:
    script = f"import sys; {line}; print(default_config_file, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HF_HOME": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(tmp_path / "accelerate" / "default_config.yaml"), "False"]


def test_there_is_one_of_each() -> None:
    import accelerate_cpp.commands.config.config_args as by_the_name_of_the_original

    assert by_the_name_of_the_original is config_args
    assert accelerate_cpp.commands.config.load_config_from_file is load_config_from_file
    with pytest.raises(AttributeError, match="no_such_name"):
        accelerate_cpp.commands.config.no_such_name  # noqa: B018
