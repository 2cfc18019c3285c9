"""The content of configuration files as objects, which can be read from files and written to them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate_cpp.config import file as config_file
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType

if TYPE_CHECKING:
    from typing_extensions import Self

_Place = str | os.PathLike[str]
_HINT = "; `accelerate-cpp config default` writes one"


def __getattr__(name: str) -> Any:
    """``default_config_file``, under two names, and its folder ``cache_dir``, according to the current environment."""
    if name in ("default_config_file", "default_yaml_config_file"):
        return str(config_file.default_path())
    if name == "cache_dir":
        return str(config_file.default_path().parent)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_config_from_file(config_file: _Place | None) -> BaseConfig:  # the original's name of the argument
    """The content of a configuration file; with ``None``, of the one that launches read by default.

    Raises:
        MissingFile: there is none.
        Unavailable: it cannot be read.
        InvalidArgument: it has a key or a value that it may not have.
    """
    path = _path_of(config_file)
    environment = _content_of(path).get("compute_environment", ComputeEnvironment.LOCAL_MACHINE)
    kind = SageMakerConfig if environment == ComputeEnvironment.AMAZON_SAGEMAKER else ClusterConfig
    return kind.from_yaml_file(path)


def _path_of(place: _Place | None) -> Path:
    return config_file.path_of(place)


def _content_of(path: Path) -> dict[str, Any]:
    return config_file.content_of(path, "a configuration file", _HINT)


@dataclass
class BaseConfig:
    """The fields that all configurations have.

    Attributes:
        compute_environment: where to train.
        distributed_type: the kind of run.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``; ``None`` if it is not set.
        use_cpu: train on the CPU even when an accelerator is present.
        debug: check the shapes of collectives before running them.
    """

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType
    mixed_precision: str | None
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        self.compute_environment = ComputeEnvironment(self.compute_environment)
        on_sagemaker = self.compute_environment == ComputeEnvironment.AMAZON_SAGEMAKER
        self.distributed_type = (SageMakerDistributedType if on_sagemaker else DistributedType)(self.distributed_type)
        for field in fields(self):
            if field.name.endswith("_config") and getattr(self, field.name) is None:
                setattr(self, field.name, {})

    def to_dict(self) -> dict[str, Any]:
        """The fields by their names, with plain values, and without ``None`` and empty sections."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
        return {name: value for name, value in plain.items() if value is not None and value != {}}

    @staticmethod
    def process_config(config_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The keys and values of a file, which is not changed, with current names and the usual defaults.

        Raises:
            InvalidArgument: ``distributed_type`` is missing.
        """
        values = dict(config_dict)
        if "distributed_type" not in values:
            raise InvalidArgument("the key distributed_type is missing; expected NO, MULTI_GPU or another kind of run")
        if values.pop("fp16", False):
            values.setdefault("mixed_precision", "fp16")
        backend = values.pop("dynamo_backend", None)
        if backend is not None:
            values["dynamo_config"] = {} if str(backend).upper() == "NO" else {"dynamo_backend": backend}
        defaults: dict[str, Any] = {"compute_environment": ComputeEnvironment.LOCAL_MACHINE, "mixed_precision": None}
        defaults |= {"use_cpu": False, "debug": False, "enable_cpu_affinity": False}
        values = defaults | values
        for name, word in (("distributed_type", "NO"), ("mixed_precision", "no")):
            if values[name] is False:  # which YAML makes of a `no` without quotes
                values[name] = word
        is_local = values["compute_environment"] == ComputeEnvironment.LOCAL_MACHINE
        if is_local and values["distributed_type"] == DistributedType.NO:
            values.setdefault("num_processes", 1)
        return values

    @classmethod
    def from_json_file(cls, json_file: _Place | None = None) -> Self:
        """The content of a file in JSON; ``None`` for the one that launches read by default.

        Raises:
            InvalidArgument: it is missing, cannot be read, or has an unknown key or an invalid value.
        """
        return cls._from_file(_path_of(json_file))

    @classmethod
    def from_yaml_file(cls, yaml_file: _Place | None = None) -> Self:
        """The content of a file in YAML; ``None`` for the one that launches read by default.

        Raises:
            InvalidArgument: it is missing, cannot be read, or has an unknown key or an invalid value.
        """
        return cls._from_file(_path_of(yaml_file))

    @classmethod
    def _from_file(cls, path: Path) -> Self:
        values = cls.process_config(_content_of(path))
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise config_file.unknown_key(str(path), name, known)
        missing = [name for name in known if name not in values and not hasattr(cls, name)]  # these have no default
        if missing:
            raise InvalidArgument(f"{path}: expected the keys {', '.join(missing)}, which are missing")
        return cls(**values)

    def to_json_file(self, json_file: _Place) -> None:
        """Writes the fields into a JSON file in one step, and replaces its previous content."""
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"
        config_file.replace_text(Path(json_file).expanduser(), text)

    def to_yaml_file(self, yaml_file: _Place) -> None:
        """Writes the fields into a YAML file in one step, and replaces its previous content."""
        config_file.save(Path(yaml_file).expanduser(), self.to_dict())


@dataclass
class ClusterConfig(BaseConfig):
    """A run on the user's own machines; the fields are the keys of the file, which ``config.file`` describes.

    Sections (``…_config``) are dicts, empty if they are not set.
    """

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None

    @classmethod
    def _from_file(cls, path: Path) -> Self:
        """Checks the values as for a launch."""
        return cls(**config_file.load(path).values)


@dataclass
class SageMakerConfig(BaseConfig):
    """A run on Amazon SageMaker. Such files can be read and written; launches refuse them.

    Attributes:
        ec2_instance_type: the kind of machine.
        iam_role_name: the role with which the job runs.
        image_uri: the image of its container; ``None`` for Hugging Face's.
        profile: the profile of the AWS credentials.
        region: the region of the machines.
        num_machines: the number of machines.
        gpu_ids: the GPUs of each machine; ``"all"``.
        base_job_name: the prefix of job names.
        pytorch_version, transformers_version, py_version: the versions in the container.
        sagemaker_inputs_file, sagemaker_metrics_file: files with tables of inputs and of metrics.
        additional_args: additional arguments of the job.
        dynamo_config: options of ``torch.compile``.
        enable_cpu_affinity: pin each process to its own cores.
    """

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str = "1.10.2"
    transformers_version: str = "4.17.0"
    py_version: str = "py38"
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False
