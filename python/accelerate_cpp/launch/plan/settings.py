"""The settings of a launch: their values and sources (command line, environment, file, default)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate_cpp.config import env_table, plugin_variables
from accelerate_cpp.config.env_table import Variable
from accelerate_cpp.config.file import ConfigFile, unknown_key
from accelerate_cpp.config.sharding_flags import (
    DEEPSPEED,
    FSDP,
    MEGATRON,
    MESH,
    SHARDING,
    ShardingFlag,
    ShardingFlags,
)
from accelerate_cpp.errors import InvalidArgument

DEFAULT = "default"


@dataclass(frozen=True)
class Setting:
    """A value, and where it came from: ``--flag``, ``environment variable NAME``, ``path: key`` or ``default``."""

    value: Any
    source: str


@dataclass(frozen=True)
class Row:
    """One setting: its flag without the dashes, its variable, its place in the file, and its default.

    ``key`` is a key of the file, or for what a file says in another way a function of the keys that it gives.
    """

    name: str
    variable: Variable[Any] | None = None
    key: str | Callable[[Mapping[str, Any]], Any] | None = None
    default: Any = None


def _trains_on_cpu(given: Mapping[str, Any]) -> bool | None:
    return True if given["distributed_type"] == "MULTI_CPU" else given.get("use_cpu")


def _trains_on_gpus(given: Mapping[str, Any]) -> bool:
    return bool(given["distributed_type"] == "MULTI_GPU")


def _trains_on_tpus(given: Mapping[str, Any]) -> bool:
    return bool(given["distributed_type"] == "XLA")


def _number_of_processes(given: Mapping[str, Any]) -> int | None:
    number = given.get("num_processes")
    if number is None and given["distributed_type"] not in ("NO", "XLA"):
        number = -1
    return 1 if number is None else number


def _mpirun_hostfile(given: Mapping[str, Any]) -> str | None:
    return (given.get("mpirun_config") or {}).get("mpirun_hostfile")


def _deepspeed(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda given: (given.get(DEEPSPEED.section) or {}).get(name)


def _compiler(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """Looks up a key of the section on torch.compile, which may be written without ``dynamo_``."""

    def look_up(given: Mapping[str, Any]) -> Any:
        section = given.get("dynamo_config") or {}
        return section.get(f"dynamo_{name}", section.get(name))

    return look_up


ROWS: tuple[Row, ...] = (
    Row("cpu", env_table.USE_CPU, _trains_on_cpu, default=False),
    Row("multi_gpu", None, _trains_on_gpus, default=False),
    Row("tpu", None, _trains_on_tpus, default=False),
    Row("tpu_use_cluster", None, "tpu_use_cluster", default=False),
    Row("tpu_use_sudo", None, "tpu_use_sudo", default=False),
    Row("tpu_name", None, "tpu_name"),
    Row("tpu_zone", None, "tpu_zone"),
    Row("tpu_env", None, "tpu_env"),
    Row("main_training_function", None, "main_training_function", default="main"),
    Row("downcast_bf16", env_table.DOWNCAST_BF16, "downcast_bf16", default=False),
    Row("num_processes", None, _number_of_processes),
    Row("num_machines", None, "num_machines", default=1),
    Row("machine_rank", None, "machine_rank", default=0),
    Row("main_process_ip", None, "main_process_ip"),
    Row("main_process_port", None, "main_process_port"),
    Row("same_network", None, "same_network", default=False),
    Row("rdzv_backend", None, "rdzv_backend", default="static"),
    Row("mpirun_hostfile", None, _mpirun_hostfile),
    *(Row(flag.name, None, _deepspeed(flag.name)) for flag in DEEPSPEED.flags if flag.variable is None),
    Row("num_cpu_threads_per_process", env_table.OMP_NUM_THREADS, None),
    Row("mixed_precision", env_table.MIXED_PRECISION, "mixed_precision", default="no"),
    Row("dynamo_backend", env_table.DYNAMO_BACKEND, _compiler("backend"), default="no"),
    Row("dynamo_mode", env_table.DYNAMO_MODE, _compiler("mode"), default="default"),
    Row("dynamo_use_fullgraph", env_table.DYNAMO_USE_FULLGRAPH, _compiler("use_fullgraph"), default=False),
    Row("dynamo_use_dynamic", env_table.DYNAMO_USE_DYNAMIC, _compiler("use_dynamic"), default=False),
    Row(
        "dynamo_use_regional_compilation",
        env_table.DYNAMO_USE_REGIONAL_COMPILATION,
        _compiler("use_regional_compilation"),
        default=False,
    ),
    Row("gradient_accumulation_steps", env_table.GRADIENT_ACCUMULATION_STEPS, None),
    Row("gpu_ids", None, "gpu_ids"),
    Row("debug", env_table.DEBUG_MODE, "debug", default=False),
    Row("enable_cpu_affinity", env_table.CPU_AFFINITY, "enable_cpu_affinity", default=False),
)


_COMPILER_ROWS = tuple(row for row in ROWS if row.name.startswith("dynamo_"))


def resolved(options: Any, environ: Mapping[str, str], file: ConfigFile | None) -> dict[str, Setting]:
    """Each setting by its name.

    Args:
        options: the flags as attributes; ``None`` or ``False`` where a flag was not given.
        file: the configuration file, if there is one.

    Raises:
        InvalidArgument: a variable cannot be read, or the file requests something that is not supported yet.
    """
    if file is not None:
        _refuse_what_does_not_work(file)
    return {row.name: _setting(row, getattr(options, row.name), environ, file) for row in ROWS}


def _setting(row: Row, flag: Any, environ: Mapping[str, str], file: ConfigFile | None) -> Setting:
    if flag is not None and flag is not False:
        return Setting(flag, f"--{row.name}")
    if row.variable is not None and row.variable.is_set(environ):
        return Setting(row.variable.get(environ), f"environment variable {row.variable.name}")
    if file is not None and row.key is not None:
        value = row.key(file.given) if callable(row.key) else file.given.get(row.key)
        if value is not None:
            name = row.key if isinstance(row.key, str) else row.name
            return Setting(value, f"{file.path}: {name}")
    return Setting(row.default, DEFAULT)


_MPIRUN_KEYS = ("mpirun_hostfile", "mpirun_ccl")  # the second, of older files, is for a library that is not used
_FP8: Mapping[str, Variable[Any]] = {
    "backend": env_table.FP8_BACKEND,
    "use_autocast_during_eval": env_table.FP8_USE_AUTOCAST_DURING_EVAL,
    "margin": env_table.FP8_MARGIN,
    "interval": env_table.FP8_INTERVAL,
    "fp8_format": env_table.FP8_FORMAT,
    "format": env_table.FP8_FORMAT,
    "amax_history_length": env_table.FP8_AMAX_HISTORY_LEN,
    "amax_history_len": env_table.FP8_AMAX_HISTORY_LEN,
    "amax_compute_algorithm": env_table.FP8_AMAX_COMPUTE_ALGO,
    "amax_compute_algo": env_table.FP8_AMAX_COMPUTE_ALGO,
    "optimization_level": env_table.FP8_OPT_LEVEL,
    "opt_level": env_table.FP8_OPT_LEVEL,
    "enable_fsdp_float8_all_gather": env_table.FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER,
    "pad_inner_dim": env_table.FP8_PAD_INNER_DIM,
}
FP8_FLAGS: Mapping[str, tuple[str, tuple[str, ...]]] = {  # what each means, and what it may be
    "backend": ("library", ("ao", "te", "msamp")),
    "use_autocast_during_eval": ("compute in fp8 in evaluation mode, too (TransformerEngine)", ()),
    "margin": ("powers of two kept free above the largest value (TransformerEngine)", ()),
    "interval": ("steps between two updates of the scales (TransformerEngine)", ()),
    "format": ("numbers of the forward and the backward pass (TransformerEngine)", ("HYBRID", "E4M3", "E5M2")),
    "amax_history_len": ("steps whose largest values the scales are made from (TransformerEngine)", ()),
    "amax_compute_algo": ("how these are combined (TransformerEngine)", ("max", "most_recent")),
    "override_linear_precision": (
        "which passes of linear layers stay in higher precision, such as false,false,true",
        (),
    ),
    "opt_level": ("level of MS-AMP", ("O1", "O2")),
    "enable_fsdp_float8_all_gather": ("gather sharded weights in fp8 (torchao)", ()),
    "pad_inner_dim": ("pad matrices to multiples of 16 (torchao)", ()),
}
_FP8_OVERRIDES = (env_table.FP8_OVERRIDE_FPROP, env_table.FP8_OVERRIDE_DGRAD, env_table.FP8_OVERRIDE_WGRAD)
_KINDS = (FSDP, DEEPSPEED, MEGATRON)
_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")


def _refuse_what_does_not_work(file: ConfigFile) -> None:
    """Refuses unsupported entries of this file; nothing in it is ignored."""
    given = file.given
    kind = given["distributed_type"]
    for name in given.get("mpirun_config") or {}:
        if name not in _MPIRUN_KEYS:
            raise unknown_key(f"{file.path}: mpirun_config", name, _MPIRUN_KEYS)
    known_names = [row.name for row in _COMPILER_ROWS]
    for name in given.get("dynamo_config") or {}:
        if name not in known_names and f"dynamo_{name}" not in known_names:
            raise unknown_key(f"{file.path}: dynamo_config", name, known_names)
    if kind not in _TYPES:
        raise InvalidArgument(
            f"{file.path}: distributed_type: {kind}: training on devices of {kind} does not work in accelerate_cpp "
            f"yet; use another file with --config_file, in which distributed_type is one of {', '.join(_TYPES)}"
        )


def compiler(settings: Mapping[str, Setting]) -> dict[Variable[Any], Any]:
    """How models are compiled while they are prepared, as variables for the workers."""
    values = {row.variable: settings[row.name].value for row in _COMPILER_ROWS if row.variable}
    return values | {env_table.DYNAMO_BACKEND: str(values[env_table.DYNAMO_BACKEND]).upper()}


def kind_of_training(
    environ: Mapping[str, str], file: ConfigFile | None, flags: Mapping[str, Any] | None = None
) -> tuple[ShardingFlags, str] | None:
    """Which of FSDP, DeepSpeed and Megatron-LM trains, and what says so: a flag, else a variable, else the file.

    Raises:
        InvalidArgument: several are asked for.
    """
    found = next((asked for asked in _asked_for(_KINDS, environ, file, flags or {}) if asked), [])
    if len(found) > 1:
        raise _exclude_each_other(*(source for _, source in found[:2]))
    return found[0] if found else None


def _asked_for(
    groups: Iterable[ShardingFlags], environ: Mapping[str, str], file: ConfigFile | None, said: Mapping[str, Any]
) -> Iterator[list[tuple[ShardingFlags, str]]]:
    """Which of ``groups`` flags ask for, then which variables do, then the file; each with what says so."""
    yield [(group, f"--{group.switch}") for group in groups if said.get(group.switch)]
    yield [
        (group, f"environment variable {group.switch_variable.name}")
        for group in groups
        if group.switch_variable.get(environ)
    ]
    yield [
        (group, f"{file.path}: {'distributed_type' if group in _KINDS else group.section}")
        for group in groups
        if file is not None and group.in_file(file.given)
    ]


def _exclude_each_other(one: str, other: str) -> InvalidArgument:
    return InvalidArgument(f"{one} and {other} exclude each other, as each says how models are trained: leave one out")


def _has_mesh(
    kind: tuple[ShardingFlags, str] | None,
    environ: Mapping[str, str],
    file: ConfigFile | None,
    said: Mapping[str, Any],
) -> bool:
    """Whether a mesh is asked for. Megatron-LM's flags make one themselves: with them, none may be asked for besides.

    A mesh does not count that is only asked for by what a flag or a variable for Megatron-LM wins over.
    """
    for asked in _asked_for((MEGATRON, MESH), environ, file, said):
        sources = dict(asked)
        if MESH in sources:
            if kind is not None and kind[0] is MEGATRON:
                raise _exclude_each_other(kind[1], sources[MESH])
            return True
        if kind is not None and kind[0] is MEGATRON and MEGATRON in sources:
            return False
    return False


def sharding(
    environ: Mapping[str, str],
    file: ConfigFile | None,
    flags: Mapping[str, Any] | None = None,
    settings: Mapping[str, Setting] | None = None,
) -> dict[Variable[Any], Any]:
    """How models are sharded, as variables for the workers: of flags, else of variables, which stay, else of the file.

    Args:
        flags: by their names; those that were not given are left out.
        settings: of this launch.

    Raises:
        InvalidArgument: a key or a value that it may not have.
    """
    said = flags or {}
    trained = kind_of_training(environ, file, said)
    kind = None if trained is None else trained[0]
    has_mesh = _has_mesh(trained, environ, file, said)
    values: dict[Variable[Any], Any] = {}
    for group in SHARDING:
        if not (has_mesh if group is MESH else group is kind):
            if group.switch_variable.get(environ):  # a flag has chosen another kind of training
                values[group.switch_variable] = False
            for flag in group.flags:
                if flag.name in said:
                    warnings.warn(f"--{flag.name} has no effect without --{group.switch}", stacklevel=2)
            continue
        values[group.switch_variable] = True
        values |= _variables_of(group, said, file, environ)
    if kind is DEEPSPEED:
        values[plugin_variables.DEEPSPEED_CONFIGURED] = _configured_fields(file, settings or {})
    return values


def _section(group: ShardingFlags, file: ConfigFile | None) -> dict[str, Any]:
    """The section of ``group`` in the file, with the whole names of its keys."""
    section: dict[str, Any] = {}
    for name, value in ((file.given.get(group.section) if file else None) or {}).items():
        full = name if name in group.keys or name.startswith(group.prefix) else f"{group.prefix}{name}"
        if full not in group.keys:
            raise unknown_key(f"{file.path if file else ''}: {group.section}", name, group.keys, compared=full)
        section[full] = value
    return section


def _variables_of(
    group: ShardingFlags, said: Mapping[str, Any], file: ConfigFile | None, environ: Mapping[str, str]
) -> dict[Variable[Any], str]:
    section = _section(group, file)
    values: dict[Variable[Any], str] = {}
    for name, flag in group.keys.items():
        text = _said_of(flag, said, section, environ)
        if text is None or not _applies(flag, said, values, environ):
            continue
        try:
            written = flag.text_for_workers(text)
        except ValueError as error:
            place = f"--{name}" if name in said or file is None else f"{file.path}: {group.section}: {name}"
            raise InvalidArgument(f"{place}: {text!r}: {error}") from None
        if flag.variable is not None:
            values[flag.variable] = written
    return values


def _configured_fields(file: ConfigFile | None, settings: Mapping[str, Setting]) -> str:
    """What the file says of training through DeepSpeed, by name; the plugin refuses it besides DeepSpeed's own file."""
    if file is None:
        return ""
    fields = [*(file.given.get(DEEPSPEED.section) or {})]
    precision = settings.get("mixed_precision")
    if precision is not None and precision.source.startswith(f"{file.path}:"):
        fields.append("mixed_precision")
    return ",".join(fields).lower()


def _said_of(
    flag: ShardingFlag, said: Mapping[str, Any], section: Mapping[str, Any], environ: Mapping[str, str]
) -> str | None:
    if flag.name in said:
        return _true_whatever_it_says(flag, said[flag.name]) if flag.value_type is bool else str(said[flag.name])
    if flag.variable is not None and flag.variable.is_set(environ):
        return None
    found = section.get(flag.name)
    return flag.default if found is None else ",".join(map(str, found)) if isinstance(found, list) else str(found)


def _true_whatever_it_says(flag: ShardingFlag, value: Any) -> str:
    if str(value).lower() != "true":
        warnings.warn(
            f"--{flag.name} {value} counts as True, like any text with the original; for False, leave the flag out",
            stacklevel=2,
        )
    return "True"


def _applies(
    flag: ShardingFlag, said: Mapping[str, Any], values: Mapping[Variable[Any], Any], environ: Mapping[str, str]
) -> bool:
    """Options of context and sequence parallelism and of pipelines only apply where these have several processes."""
    kind = flag.name.removeprefix(MESH.prefix)[:3]
    if kind not in ("cp_", "sp_", "pp_") or flag.name.endswith(("_size", "_backend")):
        return True
    size = plugin_variables.PARALLELISM[f"{kind}size"]
    if str(values.get(size) or size.get(environ)) != "1":
        return True
    if flag.name in said:
        warnings.warn(f"--{flag.name} has no effect while {MESH.prefix}{kind}size is 1", stacklevel=2)
    return False


def fp8_recipe(
    environ: Mapping[str, str], file: ConfigFile | None, flags: Mapping[str, Any] | None = None
) -> dict[Variable[Any], Any]:
    """The recipe of fp8 as variables for the workers: of flags, else of variables, which stay, else of the file.

    Args:
        flags: by their names without ``fp8_``.

    Raises:
        InvalidArgument: a key or a value that it may not have.
    """
    section = (file.given.get("fp8_config") if file is not None else None) or {}
    recipe = {
        variable: value
        for variable, value in _recipe_in(section, f"{file.path}: fp8_config" if file else "").items()
        if not variable.is_set(environ)
    }
    return recipe | _recipe_in(flags or {}, "--fp8")


def _recipe_in(section: Mapping[str, Any], place: str) -> dict[Variable[Any], Any]:
    recipe = {}
    for name, value in section.items():
        if name == "override_linear_precision":
            # The three may also stand in one text: "(false, false, true)".
            parts = value.strip("() ").split(",") if isinstance(value, str) else value
            if not isinstance(parts, (list, tuple)) or len(parts) != len(_FP8_OVERRIDES):
                raise InvalidArgument(
                    f"{place}: {name}: {value!r}: expected three of true and false: for the forward pass, gradients of "
                    "activations and gradients of weights"
                )
            said = zip(_FP8_OVERRIDES, parts, strict=True)
        else:
            said = zip([_fp8_variable(place, name)], [value], strict=True)
        for variable, part in said:
            try:
                recipe[variable] = variable.parse(str(part).strip())
            except ValueError as error:
                raise InvalidArgument(f"{place}: {name}: {value!r}: {error}") from None
    return recipe


def _fp8_variable(place: str, name: str) -> Variable[Any]:
    bare = name if name in _FP8 else name.removeprefix("fp8_")
    if bare not in _FP8:
        raise unknown_key(place, name, _FP8, compared=bare)
    return _FP8[bare]
