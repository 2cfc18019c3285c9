"""Sizes of models in bytes."""

from __future__ import annotations

from accelerate_cpp.checkpoint.files import parse_size


def convert_file_size_to_int(size: int | str) -> int:
    """The bytes that ``size`` stands for: ``5_000``, ``"10GB"`` (powers of 1000) or ``"5GiB"`` (of 1024).

    A small ``b`` behind KB, MB, GB or TB means bits: ``"8Mb"`` are 1,000,000 bytes.

    Raises:
        ValueError: ``size`` cannot be understood, or is negative.
    """
    return parse_size(size, argument="size", small_b_is_bits=True)
