"""Scripts that the original writes with other libraries; these need none."""

from __future__ import annotations

from accelerate_cpp.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, globals(), {}, ("test_metrics",))
