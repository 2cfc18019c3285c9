"""The one table of what Hugging Face Accelerate offers and this package does not do yet, and what to do instead.

Arguments, handlers, variables, methods and functions named here are refused with the sentence of their row; nothing is
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from itertools import groupby
from typing import Any, NoReturn

from accelerate_cpp.config.env_table import Variable, parse_flag
from accelerate_cpp.errors import InvalidArgument


@dataclass(frozen=True)
class Unsupported:
    """One row: ``name`` as users write it, ``asked`` for what it would do, ``instead`` for what works today."""

    name: str
    asked: str
    instead: str

    def sentence(self, found: str) -> str:
        """The message of the refusal; ``found`` is what the caller wrote."""
        return f"{found}: {self.asked} does not work in accelerate_cpp yet; {self.instead}"


ARGUMENTS: tuple[Unsupported, ...] = (
    Unsupported("fsdp_local_state", "LOCAL_STATE_DICT", "choose SHARDED_STATE_DICT or FULL_STATE_DICT"),
    Unsupported(
        "set_all_logging_options",
        "switching on everything that Megatron-LM logs, which only it knows",
        "pass tensorboard_dir: losses, rates and norms are logged",
    ),
    Unsupported("init_method", "a rendezvous of the caller's own", "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"),
    Unsupported(
        "_use_sagemaker_dp", "SageMaker's data-parallel library", "launch with torchrun inside the SageMaker container"
    ),
)
METHODS: tuple[Unsupported, ...] = (
    Unsupported("lomo_backward", "the LOMO optimizers' fused backward", "use an optimizer of torch.optim"),
)
# Steps of the original's ``prepare`` that programs call or replace, by their private names.
STEPS: tuple[Unsupported, ...] = (
    Unsupported("_prepare_cp", "context parallelism in a step of its own", "call prepare"),
    Unsupported("_prepare_tp", "tensor parallelism in a step of its own", "call prepare"),
    Unsupported("_prepare_fsdp2", "sharding parameters over the processes", "call prepare"),
)


def _functions(asked: str, instead: str, *names: str) -> tuple[Unsupported, ...]:
    return tuple(Unsupported(name, asked, instead) for name in names)


FUNCTIONS: tuple[Unsupported, ...] = (
    *_functions(
        "a step of sharding by itself",
        "call prepare, which does it",
        *("fsdp2_load_full_state_dict", "fsdp2_switch_optimizer_parameters", "compile_regions_fsdp2"),
    ),
    *_functions("a launch on Amazon SageMaker", "use prepare_multi_gpu_env", "prepare_sagemager_args_inputs"),
)


def _switch(name: str, asked: str, instead: str) -> tuple[Variable[bool], Unsupported]:
    variable = Variable(name, parse_flag, lambda value: "true" if value else "false", False, asked)
    return variable, Unsupported(name, asked, instead)


_UNSET = "unset it, or choose plain data parallelism where it was set (launch flag or configuration file)"

SWITCHES: tuple[tuple[Variable[bool], Unsupported], ...] = (
    _switch("ACCELERATE_USE_SAGEMAKER", "SageMaker's own distributed libraries", _UNSET),
)


def switch(name: str) -> Variable[bool]:
    """The variable of :data:`SWITCHES` with this name."""
    return next(variable for variable, row in SWITCHES if row.name == name)


_BY_NAME: Mapping[str, Unsupported] = {row.name: row for row in (*ARGUMENTS, *METHODS, *STEPS, *FUNCTIONS)}


def refuse(name: str, found: str) -> NoReturn:
    """Raises ``InvalidArgument`` with the sentence of row ``name``; ``found`` is what the caller wrote."""
    raise InvalidArgument(_BY_NAME[name].sentence(found))


def refuse_given(values: Mapping[str, Any]) -> None:
    """Refuses the first of ``values`` (by row name) that is not ``None``."""
    for name, value in values.items():
        if value is not None and name in _BY_NAME:
            refuse(name, f"{name}={_shown(value)}")


def _shown(value: Any) -> str:
    """What the caller wrote; of plugins, whose fields are many, only the class."""
    return f"{type(value).__name__}(...)" if is_dataclass(value) else repr(value)


def refuse_environment(environ: Mapping[str, str] | None = None) -> None:
    """Refuses the first variable of ``environ`` (default ``os.environ``) that switches on something unsupported."""
    for variable, row in SWITCHES:
        if variable.get(environ):
            raise InvalidArgument(row.sentence(f"environment variable {row.name} is set"))


def markdown_table() -> str:
    """The whole table as Markdown, for the documentation."""
    switches = tuple(row for _, row in SWITCHES)
    lines = ["| name | what it would do | what to do instead |", "|---|---|---|"]
    for prefix, rows in (("", ARGUMENTS), ("", switches), ("Accelerator.", METHODS)):
        lines += [f"| `{prefix}{row.name}` | {row.asked} | {row.instead} |" for row in rows]
    for (asked, instead), functions in groupby(FUNCTIONS, key=lambda row: (row.asked, row.instead)):
        lines.append(f"| {', '.join(f'`{row.name}`' for row in functions)} | {asked} | {instead} |")
    return "\n".join(lines) + "\n"
