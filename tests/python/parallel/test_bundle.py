"""What one prepare call holds."""

from __future__ import annotations

from accelerate_cpp.parallel.bundle import Bundle


def test_an_empty_bundle_has_lists_of_its_own() -> None:
    first, second = Bundle(), Bundle()
    first.dataloaders.append("loader")
    assert (second.models, second.optimizers, second.dataloaders, second.schedulers) == ([], [], [], [])
