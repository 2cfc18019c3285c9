"""The flags of ``accelerate-cpp``, read from its parsers: conf.py puts them into docs/cli.md while the site is built.

A line ``<!-- flags of launch -->`` of that page becomes the usage, the arguments and the flags of the command. Each
flag is an ``option`` of Sphinx, so that it has an address and is found by the search.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from importlib import import_module

from accelerate_cpp.commands.accelerate_cli import COMMANDS
from accelerate_cpp.commands.utils import CustomArgumentParser

PLACE = re.compile(r"^<!-- flags of (?P<command>[a-z0-9-]+) -->$", re.MULTILINE)
NOT_YET = ", not yet"
LONGEST_CHOICE = 60


def parsers() -> dict[str, CustomArgumentParser]:
    """Every sub-command with its parser, in the order of ``accelerate-cpp --help``."""
    root = CustomArgumentParser("accelerate-cpp")
    commands = root.add_subparsers(prog=root.prog)
    for _, module, maker, _ in COMMANDS:
        getattr(import_module(f"accelerate_cpp.commands.{module}"), maker)(commands)
    return {name: commands.choices[name] for name, *_ in COMMANDS}


def nested(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a command's own sub-commands, of which most commands have none."""
    kinds = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: sub for kind in kinds for name, sub in kind.choices.items()}


def flags(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse._ArgumentGroup, list[argparse.Action]]]:
    """The groups of a parser with what can be given, without ``--help`` and the choice of a sub-command."""
    for group in parser._action_groups:
        shown = [
            action
            for action in group._group_actions
            if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
        ]
        if shown:
            yield group, shown


def signature(action: argparse.Action) -> str:
    """A flag as it is written, with the names of its values; spellings with dashes are left out, as in ``--help``."""
    names = [name for name in action.option_strings if "-" not in name[2:]]
    choices = "" if action.choices is None else "{" + ",".join(map(str, action.choices)) + "}"
    if choices and len(choices) <= LONGEST_CHOICE:
        value = choices
    else:
        value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.nargs == 0:
        value = ""
    elif action.nargs in ("+", argparse.REMAINDER) and names:
        value += " ..."
    if not names:
        return action.dest + (" ..." if action.nargs == argparse.REMAINDER else "")
    return f"{', '.join(names)} {value}".rstrip()


def meaning(action: argparse.Action) -> str:
    """Its line of ``--help``, with the default where the line does not name it."""
    text = action.help or ""
    if action.choices is not None and sum(len(str(choice)) + 1 for choice in action.choices) >= LONGEST_CHOICE:
        text += ": one of " + ", ".join(f"`{choice}`" for choice in action.choices)
    default = action.default
    if default not in (None, False, "", argparse.SUPPRESS) and "default" not in text:
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else default
        text += f"; default: `{shown}`"
    return as_code(text.replace("%%", "%"))


def as_code(text: str) -> str:
    """A line of ``--help`` in which flags are set as code."""
    return re.sub(r"(?<![`\w-])(--?[a-z]\w*)", r"`\1`", text)


def options(program: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Lines of Markdown that describe what ``program`` takes."""
    usage = " ".join(parser.format_usage().split()).removeprefix("usage: ")
    if len(usage) > 110:  # argparse has listed every flag, as the sections below do
        positionals = [signature(action) for action in parser._actions if not action.option_strings]
        usage = " ".join([program, "[flags]", *positionals])
    yield from ("```text", usage, "```", "", f"```{{program}} {program}", "```", "")
    for group, actions in flags(parser):
        title = group.title or ""
        folded = title.endswith(NOT_YET)
        if folded:
            yield from ("<details>", f"<summary>{title}</summary>", "")
        elif title not in ("options", "positional arguments"):
            yield from (f"```{{rubric}} {title}", "```", "", as_code(group.description or ""), "")
        for action in actions:
            yield from (f"````{{option}} {signature(action)}", meaning(action), "````", "")
        if folded:
            yield from ("</details>", "")


def markdown(command: str) -> str:
    """The flags of one sub-command, and those of its own sub-commands."""
    parser = parsers()[command]
    lines = [*options(f"accelerate-cpp {command}", parser)]
    for name, sub in nested(parser).items():
        lines += [f"### `accelerate-cpp {command} {name}`", ""]
        lines += options(f"accelerate-cpp {command} {name}", sub)
    return "\n".join(lines)


def with_flags(page: str) -> str:
    """The page, with the flags of each command where it asks for them."""
    return PLACE.sub(lambda place: markdown(place["command"]), page)
