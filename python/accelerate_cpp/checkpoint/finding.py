"""Where the next checkpoint is saved, and which one is loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from accelerate_cpp.checkpoint.folder import followed, is_unfinished, numbered, put_back
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.errors import InvalidArgument

_log = logging.getLogger(__name__)


class Project(Protocol):
    """The folder of a project's checkpoints; see ``ProjectConfiguration``."""

    project_dir: str | os.PathLike[str] | None
    automatic_checkpoint_naming: bool
    total_limit: int | None
    iteration: int
    save_on_each_node: bool


def checkpoints_folder(project: Project) -> Path:
    """The folder of the numbered checkpoints; ``InvalidArgument`` for a project without a folder."""
    if project.project_dir is None:
        raise InvalidArgument(
            "automatic_checkpoint_naming=True needs a folder: pass project_dir to ProjectConfiguration or Accelerator"
        )
    return Path(project.project_dir).expanduser() / "checkpoints"


def target_of(project: Project, output_dir: str | os.PathLike[str] | None) -> Path:
    """The folder of the next checkpoint.

    Raises:
        InvalidArgument: a checkpoint with its number already exists, or no folder was given.
    """
    if not project.automatic_checkpoint_naming:
        if output_dir is None:
            raise InvalidArgument(
                "save_state needs output_dir, unless ProjectConfiguration(automatic_checkpoint_naming=True) names it"
            )
        return Path(output_dir).expanduser()
    target = checkpoints_folder(project) / f"checkpoint_{project.iteration}"
    if target.exists() and not is_unfinished(target):
        raise InvalidArgument(
            f"{target} already exists; continue with load_state(), which also sets the number of the next checkpoint, "
            "or set project_configuration.iteration"
        )
    return target


def common_numbers(project: Project, ranks: Participants) -> list[int]:
    """The numbers of the checkpoints that all ranks see, the highest first. A collective.

    Raises:
        InvalidArgument: the project does not number its checkpoints, or some ranks see checkpoints, but none that all
            see, so that what was trained would be lost without a word.
    """
    if not project.automatic_checkpoint_naming:
        raise InvalidArgument(
            "load_state needs input_dir, unless ProjectConfiguration(automatic_checkpoint_naming=True) numbers folders"
        )
    folder = checkpoints_folder(project)
    known = [set(numbers) for numbers in ranks.together("load_state", lambda: sorted(numbered(folder)))]
    common = set.intersection(*known)
    if not common and any(known):
        seen = ", ".join(f"rank {rank}: {max(one) if one else 'none'}" for rank, one in enumerate(known))
        raise InvalidArgument(
            f"there is no checkpoint in {folder} that all processes see; expected a folder that all machines share, "
            f"found as the highest number of each: {seen}. Copy the checkpoints to where they are missing, or move "
            "them away to start anew"
        )
    if common and (highest := max(max(one) for one in known)) > max(common):
        rank = next(rank for rank, one in enumerate(known) if highest not in one)
        _log.warning("%s is skipped: rank %d does not see it", folder / f"checkpoint_{highest}", rank)
    return sorted(common, reverse=True)


def newest_whole(project: Project, ranks: Participants, why_not_whole: Callable[[Path], str | None]) -> Path:
    """The checkpoint with the highest number that is complete for every rank. A collective.

    Args:
        why_not_whole: a collective that takes a folder and returns on all ranks the fault that it has, or ``None``.

    Raises:
        InvalidArgument: there is none; the message says what is wrong with each.
    """
    numbers, folder = common_numbers(project, ranks), checkpoints_folder(project)
    refused = []
    for number in numbers:
        path = folder / f"checkpoint_{number}"
        reason = why_not_whole(path)
        if reason is None:
            return path
        _log.warning("%s is incomplete and is skipped: %s", path, reason)
        refused.append(reason)
    found = "; ".join(refused) if refused else "there is none"
    raise InvalidArgument(f"load_state: expected a complete checkpoint_<number> in {folder}, found: {found}")


def given(input_dir: str | os.PathLike[str]) -> Path:
    """``input_dir`` as a path; ``InvalidArgument`` if there is no such folder."""
    path = Path(input_dir).expanduser()
    put_back(followed(path))
    if not path.is_dir():
        raise InvalidArgument(f"load_state: there is no folder {path}; expected one that save_state wrote")
    return path


def next_iteration(project: Project, saved: int | None) -> int:
    """The number of the next checkpoint after loading one that contains ``saved``: a number that no folder has."""
    candidates = [project.iteration if saved is None else saved]
    if project.automatic_checkpoint_naming and project.project_dir is not None:
        candidates += [number + 1 for number in numbered(checkpoints_folder(project))]
    return max(candidates)
