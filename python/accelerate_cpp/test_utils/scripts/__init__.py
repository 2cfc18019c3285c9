"""Scripts that a launch can run."""

from __future__ import annotations

from accelerate_cpp.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__, globals(), {}, ("external_deps", "required", "test_ops", "test_script", "test_sync")
)
