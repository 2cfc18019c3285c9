"""The configuration of DeepSpeed: a nested dict, whose entries have dotted names here."""

from __future__ import annotations

import base64
import binascii
import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate_cpp.config.text import parsed_json
from accelerate_cpp.errors import InvalidArgument

__all__ = ["HfDeepSpeedConfig"]

_OFFLOADED = {"cpu", "nvme"}


class HfDeepSpeedConfig:
    """A configuration of DeepSpeed and what it says about ZeRO.

    Args:
        config_file_or_dict: a dict, which is copied, the path of a JSON file, or JSON itself, as it is or in base64.

    Raises:
        InvalidArgument: there is no such file, or it does not contain a JSON object.
    """

    config: dict[str, Any]
    """The configuration, which may be changed; :meth:`set_stage_and_offload` then reads it again."""

    leaves_accumulation_open = False
    """Whether a program passed a configuration that does not say how many micro-batches a step has."""

    def __init__(self, config_file_or_dict: str | os.PathLike[str] | dict[str, Any]) -> None:
        if isinstance(config_file_or_dict, Mapping):
            self.config = copy.deepcopy(dict(config_file_or_dict))
        else:
            self.config = _read(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Stores the stage of ZeRO, and whether something is kept on the host or on disks."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        sections = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")
        devices = {str(self.get_value(section)) for section in sections}  # whether it may be that, DeepSpeed says
        self._offload = (self.is_zero2() or self.is_zero3()) and bool(devices & _OFFLOADED)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The dict in which the entry ``"section.subsection.key"`` is, or would be, and its key there.

        The dict is ``None`` if a section is missing.
        """
        *sections, key = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        return (node if isinstance(node, dict) else None), key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The entry, or ``default``."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Removes the entry and everything below it.

        Raises:
            InvalidArgument: with ``must_exist``, there is none.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise InvalidArgument(f"the configuration of DeepSpeed has no entry {ds_key_long}: {self.config}")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether the entry is there and true."""
        value = self.get_value(ds_key_long)
        return value is not None and bool(value)

    def is_false(self, ds_key_long: str) -> bool:
        """Whether the entry is there and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether gradients are sharded."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Whether parameters are sharded."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Whether, in stage 2 or 3, something is kept on the host or on disks."""
        return self._offload


def _read(found: Any) -> dict[str, Any]:
    if not isinstance(found, str | os.PathLike):
        raise InvalidArgument(f"configuration of DeepSpeed: {found!r}; expected a dict or the path of a JSON file")
    path = Path(found)
    try:
        text = path.read_text(encoding="utf-8") if _is_file(path) else _inline(str(found))
        config = parsed_json(text)
    except ValueError as error:
        raise InvalidArgument(
            f"configuration of DeepSpeed: {os.fspath(found)!r} is neither a file with JSON nor JSON ({error})"
        ) from None
    if not isinstance(config, dict):
        raise InvalidArgument(f"configuration of DeepSpeed: {os.fspath(found)!r} does not contain a JSON object")
    return config


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # JSON may be too long for a path
        return False


def _inline(text: str) -> str:
    if text.lstrip().startswith("{"):
        return text
    try:
        return base64.urlsafe_b64decode(text).decode("utf-8")
    except binascii.Error:
        raise ValueError("there is no such file") from None
