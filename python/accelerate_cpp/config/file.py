"""The configuration file of launches, the same as the original's: its location and its keys."""

from __future__ import annotations

import difflib
import errno
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate_cpp.config import env_table
from accelerate_cpp.config.text import parsed_json, parsed_yaml, shortened, texts_of
from accelerate_cpp.errors import InvalidArgument, MissingFile, Unavailable

NAME = "default_config.yaml"
_JSON_NAME = "default_config.json"
_TYPES = (
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_HPU",
    "MULTI_NEURON",
    "DEEPSPEED",
    "FSDP",
    "XLA",
    "MEGATRON_LM",
)
_LONGEST_NAME = 200  # of an unknown key in a message
_PRECISIONS = ("no", "fp16", "bf16", "fp8")


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("expected an integer")
    return value


def _text(value: Any) -> str:
    if isinstance(value, (bool, dict, list)):
        raise ValueError("expected a string")
    return str(value)


def _section(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError("expected a section of keys and values")
    return value


def _texts(value: Any) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    other = next((type(text).__name__ for text in texts if not isinstance(text, str)), None)
    if other is not None:
        raise ValueError(f"expected a text or a list of texts, found {other}: write each in quotes, on one line")
    return texts


def _one_of(*choices: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        # YAML 1.1 reads an unquoted no as false.
        text = "no" if value is False and "no" in choices else "NO" if value is False else value
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return str(text)

    return check


@dataclass(frozen=True)
class Key:
    """One key of the file: how its value is checked, what it is where the file does not say, and what it means.

    Attributes:
        may_hold_secrets: the value is in no message.
    """

    check: Callable[[Any], Any]
    default: Any
    doc: str
    may_hold_secrets: bool = False


KEYS: Mapping[str, Key] = {
    "compute_environment": Key(_one_of("LOCAL_MACHINE"), "LOCAL_MACHINE", "where to train"),
    "distributed_type": Key(_one_of(*_TYPES), None, "NO for one process, MULTI_CPU, MULTI_GPU, …"),
    "mixed_precision": Key(_one_of(*_PRECISIONS), None, "no, fp16, bf16 or fp8"),
    "use_cpu": Key(_truth, False, "train on the CPU even when GPUs are present"),
    "debug": Key(_truth, False, "check the shapes of collectives before running them"),
    "num_processes": Key(_whole, -1, "processes on all machines together"),
    "machine_rank": Key(_whole, 0, "the number of this machine, from 0"),
    "num_machines": Key(_whole, 1, "machines"),
    "gpu_ids": Key(_text, None, "GPUs to use, such as 0,1, or all"),
    "main_process_ip": Key(_text, None, "address of the machine with rank 0"),
    "main_process_port": Key(_whole, None, "TCP port of rank 0"),
    "rdzv_backend": Key(_text, "static", "how several machines meet"),
    "same_network": Key(_truth, False, "whether all machines are in one network"),
    "main_training_function": Key(_text, "main", "function to call on TPUs"),
    "enable_cpu_affinity": Key(_truth, False, "pin each process to cores of its own"),
    "fp8_config": Key(_section, None, "the recipe of fp8 training"),
    "deepspeed_config": Key(_section, None, "options of DeepSpeed"),
    "fsdp_config": Key(_section, None, "options of sharded training"),
    "parallelism_config": Key(_section, None, "a mesh of several kinds of parallelism"),
    "megatron_lm_config": Key(_section, None, "options of Megatron-LM"),
    "mpirun_config": Key(_section, None, "options of mpirun"),
    "downcast_bf16": Key(lambda value: _truth(value == "yes" if isinstance(value, str) else value), False, "TPUs"),
    "tpu_name": Key(_text, None, "TPUs"),
    "tpu_zone": Key(_text, None, "TPUs"),
    "tpu_use_cluster": Key(_truth, False, "TPUs"),
    "tpu_use_sudo": Key(_truth, False, "TPUs"),
    "command_file": Key(_text, None, "TPUs"),
    "commands": Key(_texts, None, "what tpu-config runs on the machines of a pod", may_hold_secrets=True),
    "tpu_vm": Key(_texts, None, "TPUs"),
    "tpu_env": Key(_texts, None, "variables NAME=VALUE for the machines of a pod", may_hold_secrets=True),
    "dynamo_config": Key(_section, None, "options of torch.compile"),
}


@dataclass(frozen=True)
class ConfigFile:
    """The content of a file.

    Attributes:
        given: the keys that stand in it, checked.
    """

    path: Path
    given: Mapping[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        """All keys, with the defaults of those that the file leaves out."""
        complete = {name: key.default for name, key in KEYS.items()} | dict(self.given)
        if "num_processes" not in self.given and complete["distributed_type"] == "NO":
            complete["num_processes"] = 1
        return complete


def default_path(environ: Mapping[str, str] | None = None) -> Path:
    """Where the file lies unless a flag says otherwise: in ``HF_HOME``, else in the user's cache."""
    home = env_table.HF_HOME.get(environ) or Path(env_table.XDG_CACHE_HOME.get(environ)) / "huggingface"
    folder = (Path(home) / "accelerate").expanduser()
    only_json = (folder / _JSON_NAME).is_file() and not (folder / NAME).is_file()
    return folder / (_JSON_NAME if only_json else NAME)


def path_of(path: str | os.PathLike[str] | None, environ: Mapping[str, str] | None = None) -> Path:
    """The file that a flag names, or for ``None`` where it lies by default."""
    return default_path(environ) if path is None else Path(path).expanduser()


def find(path: str | os.PathLike[str] | None, environ: Mapping[str, str] | None = None) -> ConfigFile | None:
    """The file at ``path``, or at the default place; ``None`` if there is no file."""
    place = path_of(path, environ)
    return None if path is None and not place.is_file() else load(place)


def load(path: str | os.PathLike[str]) -> ConfigFile:
    """Reads and checks a file.

    Raises:
        MissingFile: there is none.
        Unavailable: it cannot be read.
        InvalidArgument: it has a key or a value that it may not have, or lacks ``distributed_type``.
    """
    path = Path(path).expanduser()
    hint = "; `accelerate-cpp config default` writes one"
    return ConfigFile(path, _checked(path, content_of(path, "a configuration file", hint)))


def content_of(path: Path, kind: str = "a file of keys and values", hint: str = "") -> dict[str, Any]:
    """The keys and values of a file, JSON if its suffix says so, else YAML; not checked.

    Raises:
        MissingFile: there is none; ``kind`` says of what, and ``hint`` is put behind.
        Unavailable: it cannot be read.
        InvalidArgument: it holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _refusal_of(error)(f"{path}: cannot be read as {kind} ({error}){hint}") from error
    return _parsed(path, text)


def _refusal_of(error: Exception) -> type[InvalidArgument]:
    if isinstance(error, OSError):
        return MissingFile if isinstance(error, FileNotFoundError) else Unavailable
    return InvalidArgument


def _parsed(path: Path, text: str) -> dict[str, Any]:
    kind, parsed = ("JSON", parsed_json) if path.suffix == ".json" else ("YAML", parsed_yaml)
    try:
        content = parsed(text)
    except ValueError as error:
        raise InvalidArgument(f"{path} cannot be read as {kind}: {error}") from error
    if not isinstance(content, dict):
        raise InvalidArgument(f"{path}: expected keys and values, found {type(content).__name__}")
    unfit = next((text for text in texts_of(content) if not _can_be_passed(text)), None)
    if unfit is not None:
        raise InvalidArgument(
            f"{path}: expected texts that programs can be given, found {shortened(unfit)}, with a zero byte or half a "
            "character: take it out"
        )
    return content


def _can_be_passed(text: str) -> bool:
    """Whether command lines and environment variables can hold a text."""
    try:
        return "\0" not in text and bool(text.encode() or True)
    except UnicodeEncodeError:
        return False


def _checked(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    content = dict(content)
    if content.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise InvalidArgument(
            f"{path}: compute_environment AMAZON_SAGEMAKER does not work in accelerate_cpp yet; launch with torchrun "
            "inside the SageMaker container"
        )
    if content.pop("fp16", False) and "mixed_precision" not in content:  # as files of early versions have it
        content["mixed_precision"] = "fp16"
    backend = content.pop("dynamo_backend", None)
    if backend is not None:
        content["dynamo_config"] = {} if str(backend).upper() == "NO" else {"dynamo_backend": backend}
    given = {}
    for name, value in content.items():
        if name not in KEYS:
            raise unknown_key(str(path), str(name)[:_LONGEST_NAME], KEYS)
        try:
            given[name] = None if value is None else KEYS[name].check(value)
        except ValueError as error:
            shown = "" if KEYS[name].may_hold_secrets else f"{shortened(value)}: "
            raise InvalidArgument(f"{path}: {name}: {shown}{error}; it means: {KEYS[name].doc}") from None
    if given.get("distributed_type") is None:
        raise InvalidArgument(f"{path}: the key distributed_type is missing; expected one of {', '.join(_TYPES)}")
    return given


def unknown_key(place: str, name: str, known: Iterable[str], compared: str | None = None) -> InvalidArgument:
    """The refusal of key ``name`` at ``place``, with the known one nearest to it, or to what is ``compared``."""
    wanted = name if compared is None else compared
    nearest = max(known, key=lambda one: difflib.SequenceMatcher(None, wanted, one).ratio())
    shown = name if name.isprintable() else repr(name)
    return InvalidArgument(f"{place}: unknown key {shown}; the nearest known key is {nearest}")


def save(path: Path, values: Mapping[str, Any]) -> None:
    """Writes ``values``, sorted, in one step, without ``None`` and empty sections; JSON if the suffix says so."""
    kept = {name: value for name, value in sorted(values.items()) if value is not None and value != {}}
    if path.suffix == ".json":
        text = json.dumps(kept, indent=2, sort_keys=True) + "\n"
    else:
        import yaml

        text = yaml.safe_dump(kept)
    replace_text(path, text)


def waiting_name(path: Path) -> Path:
    """A name next to ``path`` for what is to replace it, which others who may write there cannot have a link at."""
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")


@contextmanager
def in_one_step(path: Path) -> Iterator[Path]:
    """Yields a name next to ``path`` to write to; the file then replaces ``path``, or a link there.

    Raises:
        OSError: there is something else, such as a folder, or the device /dev/null.
    """
    if path.exists() and not path.is_file() and not path.is_dir():  # which cannot be replaced
        raise OSError(errno.EINVAL, "it is no file, and is not replaced by one", str(path))
    waiting = waiting_name(path)
    try:
        yield waiting
        os.replace(waiting, path)
    finally:
        waiting.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Puts a file with ``text`` in the place of ``path``, in one step. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with in_one_step(path) as waiting, waiting.open("x", encoding="utf-8") as file:
        file.write(text)
