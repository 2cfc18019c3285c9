"""TensorBoard: what is written to event files is read back from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.trackers.tensorboard import TensorBoardTracker


def read(folder: Path) -> Any:
    """The events in ``folder``."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return events


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values of the curve ``name``."""
    return [(event.step, event.value) for event in read(folder).Scalars(name)]


@pytest.fixture
def tracker(tmp_path: Path, on_main: Callable[[bool], None]) -> TensorBoardTracker:
    """One that has been started; the run is in ``tmp_path / "run"``."""
    pytest.importorskip("tensorboard")
    made = TensorBoardTracker("run", tmp_path)
    assert made.tracker is None
    made.start()
    return made


def test_numbers_are_scalars_with_their_steps(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    tracker.log({"loss": 0.5, "count": 2, "flag": True, "tensor": torch.tensor(0.25)}, step=3)
    tracker.log({"loss": np.float32(1.5)}, step=4)
    tracker.finish()
    run = tmp_path / "run"
    assert scalars(run, "loss") == [(3, 0.5), (4, 1.5)]
    assert [scalars(run, name) for name in ("count", "flag", "tensor")] == [[(3, 2.0)], [(3, 1.0)], [(3, 0.25)]]


def test_what_was_logged_can_be_read_before_the_end(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    tracker.log({"loss": 0.5}, step=1)
    assert scalars(tmp_path / "run", "loss") == [(1, 0.5)]


def test_texts_are_texts_and_dictionaries_are_curves_in_one_diagram(
    tracker: TensorBoardTracker, tmp_path: Path
) -> None:
    tracker.log({"note": "hello", "eval": {"a": 0.5, "b": torch.tensor(2)}}, step=3)
    tracker.finish()
    run = tmp_path / "run"
    (text,) = read(run).Tensors("note/text_summary")
    assert (text.step, text.tensor_proto.string_val) == (3, [b"hello"])
    assert [scalars(run / f"eval_{name}", "eval") for name in ("a", "b")] == [[(3, 0.5)], [(3, 2.0)]]


def test_options_reach_the_writer(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    tracker.log({"loss": 0.5}, step=3, walltime=7.0)
    tracker.finish()
    assert read(tmp_path / "run").Scalars("loss")[0].wall_time == 7.0


def test_options_of_init_reach_the_writer(tmp_path: Path, on_main: Callable[[bool], None]) -> None:
    pytest.importorskip("tensorboard")
    made = TensorBoardTracker("run", tmp_path, filename_suffix=".mine")
    made.start()
    made.finish()
    assert [path.suffix for path in (tmp_path / "run").iterdir()] == [".mine"]
    assert made.tracker is made.writer


def test_what_cannot_be_shown_is_left_out_aloud_and_the_rest_is_logged(
    tracker: TensorBoardTracker, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match="tensorboard leaves out 'curve'.*torch.Tensor"):
        tracker.log({"curve": torch.zeros(3), "loss": 1}, step=1)
    with pytest.warns(UserWarning, match="tensorboard leaves out 'eval/note'"):
        tracker.log({"eval": {"note": "hello", "a": 1}}, step=1)
    tracker.finish()
    assert scalars(tmp_path / "run", "loss") == [(1, 1.0)]
    assert scalars(tmp_path / "run" / "eval_a", "eval") == [(1, 1.0)]


def test_hyperparameters_of_any_type_are_stored_twice(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    values = {"lr": 0.1, "name": "é", "flag": True, "none": None, "sizes": [1, 2], "adam": {"eps": 1e-8}}
    tracker.store_init_configuration(values)
    tracker.finish()
    (file,) = (tmp_path / "run").glob("*/hparams.yml")
    assert yaml.safe_load(file.read_text(encoding="utf-8")) == values
    (events,) = [path.parent for path in (tmp_path / "run").glob("*/events*")]
    content = read(events).summary_metadata["_hparams_/session_start_info"].plugin_data.content
    plugin = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData
    stored = plugin.FromString(content).session_start_info.hparams
    assert {name: stored[name].string_value for name in ("name", "none", "sizes")} == {
        "name": "é",
        "none": "None",
        "sizes": "[1, 2]",
    }
    assert (stored["lr"].number_value, stored["adam/eps"].number_value) == (0.1, 1e-8)
    assert stored["flag"].bool_value or stored["flag"].number_value == 1


def test_the_folder_of_the_run_itself_holds_one_event_file(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 1}, step=0)
    tracker.finish()
    assert len([path for path in (tmp_path / "run").iterdir() if path.is_file()]) == 1
    assert tracker.logging_dir == str(tmp_path / "run")


GRAY = np.full((2, 3), 100, np.uint8)
RED = np.zeros((2, 3, 3), np.uint8)
RED[..., 0] = 200


@pytest.mark.parametrize(
    ("images", "options", "colour"),
    [
        ([RED, RED], {}, (200, 0, 0)),
        ([RED.transpose(2, 0, 1)], {"dataformats": "NCHW"}, (200, 0, 0)),
        ([Image.fromarray(RED)], {}, (200, 0, 0)),
        ([np.dstack([RED, GRAY])], {}, (200, 0, 0)),
        ([GRAY, GRAY], {}, (100, 100, 100)),
        ([torch.from_numpy(np.tile(GRAY, (1, 2, 2)))], {}, (100, 100, 100)),
        (np.stack([RED]).transpose(0, 3, 1, 2), {}, (200, 0, 0)),
        (np.stack([RED]), {"dataformats": "NHWC"}, (200, 0, 0)),
    ],
    ids=["hwc", "chw", "pil", "rgba", "gray", "gray-chw", "batch", "batch-nhwc"],
)
def test_images_are_batches_or_lists(
    tracker: TensorBoardTracker, tmp_path: Path, images: Any, options: dict[str, Any], colour: tuple[int, ...]
) -> None:
    import io

    tracker.log_images({"samples": images}, step=2, **options)
    tracker.finish()
    (event,) = read(tmp_path / "run").Images("samples")
    shown = Image.open(io.BytesIO(event.encoded_image_string)).convert("RGB")
    assert event.step == 2
    assert shown.getpixel((0, 0)) == colour


@pytest.mark.parametrize("images", [[], [GRAY, RED], [np.zeros(3)]])
def test_lists_of_images_that_do_not_fit_together_are_refused(tracker: TensorBoardTracker, images: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match="'samples' holds images of the shapes"):
        tracker.log_images({"samples": images})


def test_on_other_processes_nothing_happens(tmp_path: Path, on_main: Callable[[bool], None]) -> None:
    on_main(False)
    made = TensorBoardTracker("run", tmp_path)
    made.start()
    made.store_init_configuration({"lr": 1})
    made.log({"loss": 1})
    made.log_images({"samples": [RED]})
    made.finish()
    assert list(tmp_path.iterdir()) == []


def test_tensorboardx_serves_where_tensorboard_is_missing(
    tmp_path: Path,
    double: Callable[..., list[Any]],
    not_installed: Callable[..., None],
    on_main: Callable[[bool], None],
) -> None:
    not_installed("tensorboard")
    calls = double("tensorboardX")
    made = TensorBoardTracker("run", tmp_path, max_queue=1)
    made.start()
    made.log({"loss": 0.5}, step=3)
    made.finish()
    assert calls == [
        ("tensorboardX.SummaryWriter", str(tmp_path / "run"), {"max_queue": 1}),
        ("tensorboardX.SummaryWriter().add_scalar", "loss", 0.5, {"global_step": 3}),
        ("tensorboardX.SummaryWriter().flush",),
        ("tensorboardX.SummaryWriter().close",),
    ]


def test_it_needs_a_library_and_a_start(
    tmp_path: Path, not_installed: Callable[..., None], on_main: Callable[[bool], None]
) -> None:
    with pytest.raises(InvalidArgument, match="not been started"):
        TensorBoardTracker("run", tmp_path).log({"loss": 1})
    not_installed("tensorboard", "tensorboardX")
    with pytest.raises(MissingLibrary, match="pip install tensorboard"):
        TensorBoardTracker("run", tmp_path).start()
