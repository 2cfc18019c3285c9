"""Which loaders are being read."""

from __future__ import annotations

import gc

from accelerate_cpp.runtime.reading import Reading


class Loader:
    """As much of a prepared loader as is looked at."""

    def __init__(self, end_of_dataloader: bool = False, remainder: int = -1) -> None:
        self.end_of_dataloader = end_of_dataloader
        self.remainder = remainder


def test_without_a_loader_nothing_ends_and_nothing_is_known() -> None:
    reading = Reading()
    assert reading.active_loader is None
    assert (reading.end_of_dataloader, reading.remainder) == (False, -1)


def test_the_innermost_loader_decides_until_it_is_removed() -> None:
    reading, outer, inner = Reading(), Loader(remainder=3), Loader(end_of_dataloader=True, remainder=1)
    reading.push_loader(outer)
    reading.push_loader(inner)
    assert (reading.active_loader, reading.end_of_dataloader, reading.remainder) == (inner, True, 1)
    reading.remove_loader(inner)
    assert (reading.active_loader, reading.end_of_dataloader, reading.remainder) == (outer, False, 3)


def test_a_loader_that_is_read_twice_stays_active_until_both_reads_end() -> None:
    reading, loader = Reading(), Loader()
    reading.push_loader(loader)
    reading.push_loader(loader)
    reading.remove_loader(loader)
    assert reading.active_loader is loader
    reading.remove_loader(loader)
    assert reading.active_loader is None


def test_removing_an_unknown_loader_changes_nothing() -> None:
    reading, loader = Reading(), Loader()
    reading.push_loader(loader)
    reading.remove_loader(Loader())
    assert reading.active_loader is loader


def test_an_abandoned_loader_is_forgotten() -> None:
    reading, outer, inner = Reading(), Loader(), Loader()
    reading.push_loader(outer)
    reading.push_loader(inner)
    del inner
    gc.collect()
    assert reading.active_loader is outer


def test_the_loaders_that_are_being_read_can_be_listed_and_replaced() -> None:
    reading, outer, inner = Reading(), Loader(), Loader()
    reading.push_loader(outer)
    reading.push_loader(inner)
    assert reading.loaders == [outer, inner]
    reading.loaders = [inner, outer]
    assert reading.active_loader is outer
    del outer
    gc.collect()
    assert reading.loaders == [inner]
