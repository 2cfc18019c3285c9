"""How those keys of a configuration file are shown whose lines may hold secrets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["shown"]

_HARMLESS = re.compile(r"[+-]?\d{1,9}(\.\d{1,9})?|true|false|yes|no|on|off", re.IGNORECASE)


def _variable(line: str) -> str:
    """``NAME=TEXT`` for the machines of a pod, with the text if no secret looks like it."""
    from accelerate_cpp.launch.workers.over_ssh import is_secret  # here, as few files have such lines

    name, equals, text = line.partition("=")
    if not equals or not name.isidentifier():
        return "…"
    return line if _HARMLESS.fullmatch(text) and not is_secret(name) else f"{name}=…"


def _command(line: str) -> str:
    """The program of a command for the machines of a pod, without its arguments."""
    program, *arguments = line.split() or [""]
    return " ".join([program if re.fullmatch(r"[\w./-]*", program) else "…", *["…"] * bool(arguments)])


_SHOWN: Mapping[str, Callable[[str], str]] = {"tpu_env": _variable, "commands": _command}


def shown(name: str, value: Any) -> Any:
    """The value of the key ``name`` of a configuration file, with its lines as they may be shown."""
    show = _SHOWN.get(name)
    return value if show is None or not value else [show(line) for line in value]
