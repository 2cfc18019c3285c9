"""The view of gradient accumulation."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator

import pytest

from accelerate_cpp.config.session_config import AccumulationConfig
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.gradient_state import GradientState, GradientStateOf, begin_accumulation, set_accumulation
from accelerate_cpp.utils.dataclasses import GradientAccumulationPlugin


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    GradientState._reset_state()
    yield
    GradientState._reset_state()


class Loader:
    """As much of a prepared loader as the state looks at."""

    end_of_dataloader = True
    remainder = 2


def test_without_a_loader_everything_is_neutral() -> None:
    state = GradientState()
    assert (state.sync_gradients, state.end_of_dataloader, state.remainder, state.in_dataloader) == (
        True,
        False,
        -1,
        False,
    )
    assert (state.num_steps, state.adjust_scheduler, state.sync_with_dataloader) == (1, False, True)
    assert state.active_dataloader is None


def test_all_instances_see_the_same() -> None:
    one, two = GradientState(), GradientState()
    one._set_sync_gradients(False)
    assert not two.sync_gradients
    assert one.__dict__ is two.__dict__


def test_the_active_loader_is_the_one_that_was_added_last() -> None:
    state, loader = GradientState(), Loader()
    state._add_dataloader(loader)
    assert (state.active_dataloader, state.in_dataloader) == (loader, True)
    assert (state.end_of_dataloader, state.remainder) == (True, 2)
    state._remove_dataloader(loader)
    assert not state.in_dataloader


def test_a_plugin_changes_the_settings_and_none_leaves_them() -> None:
    GradientState(GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False, sync_each_batch=True))
    assert GradientState().plugin_kwargs == {
        "num_steps": 3,
        "adjust_scheduler": False,
        "sync_with_dataloader": False,
        "sync_each_batch": True,
    }


def test_a_setting_that_is_set_counts() -> None:
    state = GradientState()
    state.plugin_kwargs["num_steps"] = 5
    state.plugin_kwargs.update({"adjust_scheduler": True}, sync_with_dataloader=False)
    assert (state.num_steps, state.adjust_scheduler, state.sync_with_dataloader) == (5, True, False)
    assert state.plugin_kwargs["num_steps"] == 5
    for wrong, message in (({"num_steps": 0}, "at least 1"), ({"steps": 2}, "no setting 'steps'")):
        with pytest.raises(InvalidArgument, match=message):
            state.plugin_kwargs.update(wrong)
    assert state.num_steps == 5


def test_settings_are_copied_as_a_dict() -> None:
    copied = pickle.loads(pickle.dumps(GradientState().plugin_kwargs))
    copied["num_steps"] = 7
    assert type(copied) is dict
    assert GradientState().num_steps == 1


def test_a_plugin_with_no_steps_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least 1"):
        GradientState(GradientAccumulationPlugin(num_steps=0))


def test_new_settings_keep_the_loader_and_count_from_zero() -> None:
    state, loader = GradientState(), Loader()
    state._add_dataloader(loader)
    current.accumulation.step = 3
    set_accumulation(AccumulationConfig(num_steps=2))
    assert (state.num_steps, current.accumulation.step, state.active_dataloader) == (2, 0, loader)


def test_a_reset_forgets_loaders_and_settings() -> None:
    state, loader = GradientState(GradientAccumulationPlugin(num_steps=3)), Loader()
    state._add_dataloader(loader)
    assert state.initialized
    GradientState._reset_state()
    assert not state.initialized
    assert (state.num_steps, state.in_dataloader) == (1, False)


def test_its_text_shows_where_the_run_stands() -> None:
    assert "Sync Gradients: True" in repr(GradientState())


def test_references_begin_with_none_and_name_the_loaders_that_are_read() -> None:
    state, outer, inner = GradientState(), Loader(), Loader()
    assert state.dataloader_references == [None]
    state.dataloader_references += [outer]
    state.dataloader_references += [inner]
    assert state.dataloader_references == [None, outer, inner]
    assert state.active_dataloader is inner
    state.dataloader_references = [loader for loader in state.dataloader_references if loader is not inner]
    assert state.active_dataloader is outer


def test_references_keep_no_loader_alive() -> None:
    state, loader = GradientState(), Loader()
    state.dataloader_references = [None, loader]
    del loader
    gc.collect()
    assert state.dataloader_references == [None]


def test_what_is_said_of_xla_is_kept_until_a_reset() -> None:
    assert GradientState().is_xla_gradients_synced is False
    GradientState().is_xla_gradients_synced = True
    assert GradientState().is_xla_gradients_synced is True
    GradientState._reset_state()
    assert GradientState().is_xla_gradients_synced is False


def test_a_pickled_accumulation_is_the_current_one_where_it_is_loaded() -> None:
    pickled = pickle.dumps(begin_accumulation(AccumulationConfig(num_steps=2)))
    latest = begin_accumulation(AccumulationConfig(num_steps=3))
    assert pickle.loads(pickled) is latest


def test_the_state_of_one_accelerator_stays_its_own() -> None:
    first = begin_accumulation(AccumulationConfig(num_steps=2))
    own = GradientStateOf(first)
    begin_accumulation(AccumulationConfig(num_steps=3))
    own._set_sync_gradients(False)
    assert (own.num_steps, own.sync_gradients) == (2, False)
    assert (GradientState().num_steps, GradientState().sync_gradients) == (3, True)
