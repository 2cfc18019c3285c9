"""Redirects what a script saves to a folder of the check, and finds state that is not saved."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from accelerate_cpp.check.observed import Observed
from accelerate_cpp.check.source import is_the_users, user_frame


class Saving:
    """Watches what is saved, and redirects it to ``folder``, so that a check overwrites nothing."""

    def __init__(self, observed: Observed, folder: Path) -> None:
        self._observed, self._folder = observed, folder

    def elsewhere(self, path: Any) -> Any:
        """The place to which ``path`` is written in the check; anything but a path is returned unchanged."""
        if not isinstance(path, (str, os.PathLike)):
            return path
        if Path(os.path.abspath(path)).is_relative_to(self._folder):
            return path
        copy = self._copy_of(path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        return str(copy)

    def written(self, path: Any) -> Any:
        """The place from which ``path`` is read: the file that the check has written for it, else itself."""
        if not isinstance(path, (str, os.PathLike)):
            return path
        copy = self._copy_of(path)
        return str(copy) if copy.exists() else path

    def saves(self, name: str) -> None:
        """The script calls a method, or function, that saves something."""
        self._observed.saved.append(name)

    def save_state(self, accelerator: Any, save: Callable[..., Any], output_dir: Any, *args: Any, **kwargs: Any) -> Any:
        """``Accelerator.save_state`` in the folder of the check."""
        self.saves("save_state")
        self._judge_what_is_left_out(accelerator)
        with _moved_project(accelerator.project_configuration, self.elsewhere):
            return save(accelerator, self.elsewhere(output_dir), *args, **kwargs)

    def load_state(self, accelerator: Any, load: Callable[..., Any], input_dir: Any, *args: Any, **kwargs: Any) -> Any:
        """``Accelerator.load_state`` of what the check has saved, where it has saved something."""
        with _moved_project(accelerator.project_configuration, self.written):
            return load(accelerator, self.written(input_dir), *args, **kwargs)

    def conclude(self, has_ended: bool) -> None:
        """Reports if a script that has ended saved nothing."""
        if has_ended and self._observed.steps and not self._observed.saved:
            self._observed.find(
                "note",
                "never-saved",
                "the script ends without having saved anything",
                "call save_state or save_model",
                "",
            )

    def _copy_of(self, path: str | os.PathLike[str]) -> Path:
        folder, name = os.path.split(os.path.abspath(path))
        return self._folder / hashlib.sha1(folder.encode()).hexdigest()[:12] / name

    def _judge_what_is_left_out(self, accelerator: Any) -> None:
        kept = {id(item) for item in accelerator._custom_objects}
        for kind in ("models", "optimizers", "schedulers", "dataloaders"):
            for item in getattr(accelerator, f"_{kind}"):
                kept |= {id(item), *(id(getattr(item, name, None)) for name in ("optimizer", "scheduler"))}
                if isinstance(item, torch.nn.Module):
                    kept |= {id(module) for module in item.modules()}
        left_out = {
            name: item
            for name, item in _names_in_reach(user_frame()).items()
            if id(item) not in kept and _has_state(item)
        }
        if left_out:
            shown = ", ".join(f"{name} ({type(item).__name__})" for name, item in sorted(left_out.items()))
            self._observed.find(
                "warning",
                "unsaved-state",
                f"save_state leaves out the state of {shown}",
                "pass it to prepare or to register_for_checkpointing",
            )


@contextmanager
def _moved_project(project: Any, to: Callable[[Any], Any]) -> Iterator[None]:
    """The project is in the folder that ``to`` returns for its own."""
    before, project.project_dir = project.project_dir, to(project.project_dir)
    try:
        yield
    finally:
        project.project_dir = before


def _names_in_reach(frame: FrameType | None) -> dict[str, Any]:
    """Variables of the user's functions that are running, and of their modules."""
    names: dict[str, Any] = {}
    while frame is not None:
        if is_the_users(frame.f_code):
            names = {**frame.f_globals, **frame.f_locals, **names}
        frame = frame.f_back
    return names


def _has_state(item: Any) -> bool:
    """Whether training changes the state of ``item``."""
    kind = type(item)
    if isinstance(item, type) or not (hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")):
        return False
    if isinstance(item, torch.nn.Module):
        return isinstance(item, AveragedModel)  # others are trained, which is reported elsewhere, or do not change
    # Optimizers and schedulers are reported when they step; others may be parts of a prepared one.
    known = (torch.optim.Optimizer, LRScheduler, torch.utils.data.DataLoader, torch.amp.GradScaler)
    return not isinstance(item, known) and kind.__module__.partition(".")[0] not in ("accelerate_cpp", "torch")
