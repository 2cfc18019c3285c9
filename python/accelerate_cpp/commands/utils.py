"""Shared by the commands: a parser that refuses in one sentence, and types of flag values."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

USAGE_ERROR = 2


class _UnderscoreHelp(argparse.HelpFormatter):
    """Lists flags only with underscores; the spelling with dashes is also accepted."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        spellings = action.option_strings
        action.option_strings = [text for text in spellings if "-" not in text[2:]]
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = spellings


class _Flags(argparse._ActionsContainer):
    """Adds a spelling with dashes to every flag with underscores."""

    def add_argument(self, *names: str, **kwargs: Any) -> argparse.Action:
        dashed = [f"--{name[2:].replace('_', '-')}" for name in names if name.startswith("--") and "_" in name]
        return super().add_argument(*names, *dashed, **kwargs)


class _FlagGroup(_Flags, argparse._ArgumentGroup):
    pass


class CustomArgumentParser(_Flags, argparse.ArgumentParser):
    """Accepts dashes for underscores in every flag, no abbreviations, and refuses in one sentence with exit code 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _UnderscoreHelp)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> argparse._ArgumentGroup:
        group = _FlagGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = sys.argv[1:] if args is None else list(args)
        self._refuse_unknown(self._flags_before_positionals(given))
        parsed, extras = super().parse_known_args(given, namespace)
        self._refuse_unknown(extra for extra in extras if extra.startswith("-"))
        return parsed, extras

    def error(self, message: str) -> NoReturn:
        sentence = re.sub(r"^argument (\S+?)(/\S+)?:", r"\1:", message)  # one of the spellings is enough
        self.exit(USAGE_ERROR, f"{self.prog}: {sentence}\n")

    def _flags_before_positionals(self, given: Sequence[str]) -> Iterable[str]:
        """The long flags in ``given`` up to the first positional argument, so that they are reported first."""
        tokens = iter(given)
        for token in tokens:
            if not token.startswith("-") or token == "--":
                return
            flag, equals, _ = token.partition("=")
            action = self._option_string_actions.get(flag)
            if token.startswith("--"):
                yield flag
            if action is not None and action.nargs is None and not equals:
                next(tokens, None)

    def _refuse_unknown(self, flags: Iterable[str]) -> None:
        for flag in flags:
            if flag not in self._option_string_actions:
                self.error(f"unknown flag {flag}; the nearest known flag is {self._nearest_flag(flag)}")

    def _nearest_flag(self, flag: str) -> str:
        wanted = flag.replace("-", "_")

        def closeness(known: str) -> tuple[bool, float]:
            comparable = known.replace("-", "_")
            return comparable.startswith(wanted), difflib.SequenceMatcher(None, wanted, comparable).ratio()

        known_flags = (text for text in self._option_string_actions if text.startswith("--") and "-" not in text[2:])
        return max(known_flags, key=closeness)


def command_parser(
    subparsers: argparse._SubParsersAction[CustomArgumentParser] | None,
    name: str,
    description: str,
    usage: str | None = None,
) -> CustomArgumentParser:
    """The parser of the command ``name``, by itself or as one of ``subparsers``."""
    if subparsers is None:
        return CustomArgumentParser(f"accelerate-cpp {name}", description=description, usage=usage)
    return subparsers.add_parser(name, description=description, help=description, usage=usage)


def integer_from(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """A flag type: an integer of at least ``minimum`` and at most ``maximum``."""
    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"expected an integer {bounds}, got {text!r}")
        return value

    return parse
