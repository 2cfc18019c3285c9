"""Comparing the versions of installed libraries."""

from __future__ import annotations

from accelerate_cpp.config.libraries import STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC
from accelerate_cpp.config.libraries import compare_versions, is_torch_version

__all__ = ["compare_versions", "is_torch_version"]
