"""The place of this process."""

from __future__ import annotations

import os


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def global_ordinal() -> int:
    return int(os.environ.get("RANK", "0"))


def local_ordinal() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_device_count() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def addressable_device_count() -> int:
    return int(os.environ.get("DOUBLE_DEVICES", "1"))


def is_spmd() -> bool:
    return False


def device_type() -> str:
    return "TPU"
