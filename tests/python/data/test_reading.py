"""Reading from where a pass starts; what of it leaves samples out is tested with cursors."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_cpp.data.cursor import cursor_of, restore_cursor
from accelerate_cpp.data.reading import opened
from accelerate_cpp.data_loader import prepare_data_loader, skip_first_batches


def prepared(**options):
    return prepare_data_loader(DataLoader(list(range(10)), batch_size=2), use_stateful_dataloader=True, **options)


def test_a_pass_from_the_start_reads_the_loader_itself():
    loader = prepared()
    source, batches = opened(loader, loader.progress.begin(loader))
    assert source is loader.base_dataloader
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_a_pass_from_elsewhere_reads_another_loader_of_the_same_class():
    loader = prepared()
    next(iter(loader))
    cursor = cursor_of(loader)
    restore_cursor(loader, cursor)
    source, batches = opened(loader, loader.progress.begin(loader))
    assert source is not loader.base_dataloader
    assert type(source) is type(loader.base_dataloader)
    assert [batch.tolist() for batch in batches] == [[2, 3], [4, 5], [6, 7], [8, 9]]


def test_the_rest_of_a_pass_draws_no_random_numbers():
    loader = prepared()
    next(iter(loader))
    restore_cursor(loader, cursor_of(loader))
    before = torch.get_rng_state()
    opened(loader, loader.progress.begin(loader))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_that_was_not_read_is_forgotten_when_batches_are_skipped():
    pytest.importorskip("torchdata.stateful_dataloader")
    loader, fresh = prepared(), prepared()
    next(iter(loader))
    fresh.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in skip_first_batches(fresh, 3)] == [[6, 7], [8, 9]]
    assert len(list(fresh)) == 5
