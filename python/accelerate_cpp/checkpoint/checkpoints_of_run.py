"""The checkpoints of one ``Accelerator``: their hooks and registered objects, saving, loading, and the writer."""

from __future__ import annotations

import logging
import os
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from accelerate_cpp.checkpoint import finding
from accelerate_cpp.checkpoint.background import BackgroundWriter, await_writers
from accelerate_cpp.checkpoint.engine_states import EngineStates
from accelerate_cpp.checkpoint.finding import Project
from accelerate_cpp.checkpoint.folder import begin, followed, is_unfinished, remove_leftovers, remove_unfinished
from accelerate_cpp.checkpoint.in_place import has_to_stay
from accelerate_cpp.checkpoint.layout import (
    SavedStates,
    StateFile,
    check_states,
    custom_file,
    own_files,
    random_states_file,
    read_custom,
    read_models,
    read_states,
    restore_parts,
    shared_files,
    warn_of_missing,
)
from accelerate_cpp.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest, why_not_whole
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.checkpoint.sharded_states import Parts, named_parameters, parts_of
from accelerate_cpp.checkpoint.snapshot import SnapshotMemory
from accelerate_cpp.checkpoint.writers_group import WRITERS_GROUP
from accelerate_cpp.checkpoint.writing import Checkpoint
from accelerate_cpp.errors import CheckpointError, InvalidArgument, PeerLost
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.strategy import Strategy

_log = logging.getLogger(__name__)
Weights = list[dict[str, Any]]
_THREADS = 2  # model and optimizer, while training waits


class Checkpoints:
    """Saves and restores what an ``Accelerator`` prepared, and what the user registered.

    Attributes:
        are_of_all: whether the program, as far as is known, saves on all ranks and not only on the main one. A rank
            that dies before a checkpoint is then missed: the checkpoint would be without its random states.
    """

    def __init__(self) -> None:
        self.custom_objects: list[Any] = []
        self.save_hooks: dict[int, Callable[..., None]] = OrderedDict()
        self.load_hooks: dict[int, Callable[..., None]] = OrderedDict()
        self._writer, self._memory = BackgroundWriter(), SnapshotMemory()
        self.are_of_all = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the same hooks and objects, but its own writer."""
        return {name: vars(self)[name] for name in ("custom_objects", "save_hooks", "load_hooks")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Checkpoints.__init__(self)
        vars(self).update(state)

    def register(self, objects: Sequence[Any]) -> None:
        """Adds objects with ``state_dict`` and ``load_state_dict``; ``InvalidArgument`` names those without."""
        wrong = [
            f"Item at index {index}, a {type(one).__name__}"
            for index, one in enumerate(objects)
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict"))
        ]
        if wrong:
            raise InvalidArgument(
                "register_for_checkpointing takes objects with the methods state_dict and load_state_dict, not "
                + "; ".join(wrong)
            )
        self.custom_objects.extend(objects)

    def add_save_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Calls ``hook(models, weights, folder)`` before each save."""
        return _added(self.save_hooks, hook)

    def add_load_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Calls ``hook(models, folder)`` before each load."""
        return _added(self.load_hooks, hook)

    def release_memory(self) -> None:
        """Frees the memory of copies for background writing."""
        self._memory.release()

    def wait(self) -> None:
        """Waits until nothing is being written; raises the error of the last write, once."""
        self._writer.wait()

    def save(
        self,
        output_dir: str | os.PathLike[str] | None,
        project: Project,
        ranks: Participants,
        bundle: Bundle,
        strategy: Strategy,
        step: int,
        cursors: Callable[[], list[dict[str, int | str]]],
        safe_serialization: bool = True,
        blocking: bool = True,
        engine_options: Mapping[str, Any] | None = None,
    ) -> Path:
        """Writes everything into one folder, which appears when it is complete.

        A collective if all ranks call it; the main process (of each host, if the project saves there) may also call it
        alone; then the random states are only its own. Other processes that call it alone save nothing, and log a
        warning.

        Args:
            output_dir: the folder, unless ``project`` numbers its checkpoints.
            strategy: knows the states of the models, and how checkpoints hold them.
            step: micro-batches since the last forced synchronisation.
            cursors: returns the position of each loader.
            blocking: if false, returns when everything is copied; a thread writes the copy, and the next call, or
                :meth:`wait`, raises its error. Engines of another library are not copied, so this then waits.
            engine_options: for the library that writes engines.

        Returns:
            The folder.

        Raises:
            PeerLost: a rank has died, and its part would be missing: see ``are_of_all``. On processes other than the
                main one whatever is known, as what they save alone is nothing. Once: who knows of it is alone. Or
                the main process may have left, and this is another one.
        """
        self.wait()
        is_main = (ranks.topology.local_rank if project.save_on_each_node else ranks.topology.rank) == 0
        ranks = ranks.those_in(
            f"save_state {os.path.basename(output_dir or '')}",
            with_the_dead=self.are_of_all or not is_main,
            needs_all=strategy.layout != "plain",
        )
        self.are_of_all = not ranks.alone

        if project.automatic_checkpoint_naming:
            project.iteration = max(ranks.gather(project.iteration))  # the main process may have saved alone
        # All ranks check for the folder before hooks on any of them write into it.
        places = ranks.together("save_state", lambda: _place_of(finding.target_of(project, output_dir)))
        named, target, _ = places[ranks.place]
        in_place = any(stays for _, _, stays in places)
        if ranks.alone and not is_main:
            without_rank_0 = ranks.here is not None and 0 not in ranks.here
            if without_rank_0 and ranks.meeting is not None and ranks.meeting.someone_has_left():
                raise PeerLost(
                    f"save_state on rank {ranks.topology.rank} waited for rank 0, but a rank has left the group: "
                    "nothing was saved"
                )
            _log.warning(
                "save_state was called on rank %d, but neither on all ranks nor on the main process: nothing is "
                "saved; call it on all ranks, or only on the main process",
                ranks.topology.rank,
            )
            return named
        are_numbered = project.automatic_checkpoint_naming
        if are_numbered:
            await_writers()  # another object of this program may be saving under another number

        def clear() -> None:
            if ranks.lead_a_host:
                remove_leftovers(target, of_all_numbers=are_numbered)

        # One after the other: while one rank removes a folder, another may find half of it.
        ranks.together("save_state", clear)
        engines = _engines(strategy, bundle, engine_options)
        in_shards = strategy.layout in ("whole", "shards")
        waits = blocking or engines is not None
        parts = parts_of(bundle, strategy, ranks, is_main) if in_shards else Parts()
        rest = replace(bundle, optimizers=[]) if in_shards else bundle

        def prepared() -> Checkpoint:
            plain = strategy.layout == "plain"
            weights = [strategy.model_state(model) for model in bundle.models] if plain else []
            states = self._after_hooks(bundle, weights, named, target)
            files = [
                random_states_file(ranks.topology.rank, step, bundle.dataloaders),
                *own_files(bundle, ranks.topology.rank),
                *parts.files,
            ]
            if is_main:
                files += shared_files(rest, states, safe_serialization) + self._custom_files()
            files = [replace(file, content=strategy.to_host(file.content)) for file in files]
            manifest = Manifest(project.iteration + 1, ranks.num_together, {}, cursors())
            limit = project.total_limit if project.automatic_checkpoint_naming else None
            checkpoint = Checkpoint(
                target,
                uuid.uuid4().hex[:8],
                files,
                manifest,
                limit,
                in_place,
                project.save_on_each_node,
                parts.folders,
                engines,
            )
            return checkpoint if waits else checkpoint.copied(self._memory)

        try:
            checkpoint = self._agreed("save_state", prepared, ranks)
        except BaseException:
            if ranks.lead_a_host and is_unfinished(target):
                remove_unfinished(target)
            raise
        if waits:
            try:
                checkpoint.write(ranks, threads=_THREADS)
            except BaseException:
                # A rank that dies just after the folder got its name does not make it less complete.
                if project.automatic_checkpoint_naming and (target / MANIFEST_NAME).is_file():
                    project.iteration += 1
                raise
        else:
            apart = replace(ranks, group=WRITERS_GROUP.of(self._writer)) if ranks.num_together > 1 else ranks
            self._writer.start(lambda: checkpoint.write(apart))
        project.iteration += 1
        return named

    def load(
        self,
        input_dir: str | os.PathLike[str] | None,
        project: Project,
        ranks: Participants,
        bundle: Bundle,
        strategy: Strategy,
        check_cursors: Callable[[list[dict[str, int | str]]], None],
        map_location: Any = "cpu",
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_kwargs: Any,
    ) -> tuple[dict[str, Any], list[dict[str, int | str]]]:
        """Restores everything from a folder, and the number of the project's next checkpoint.

        A collective if all ranks call it; a rank that calls it alone loads for itself. All ranks read all files and
        compare them with the objects that will load them, before anything is changed on any rank. Then hooks are
        called, which may remove models; if the state of a remaining model does not fit, only the changes of the hooks
        themselves have been made.

        Args:
            input_dir: ``None`` loads the newest complete checkpoint.
            strategy: knows the module that the user prepared, whose names are those in the file, and restores it.
            check_cursors: raises if loaders cannot continue at these cursors.

        Returns:
            ``{"step": …}`` if the folder contains it, and the cursors of the loaders, none for folders of the original.

        Raises:
            InvalidArgument: there is no such folder, or no complete checkpoint.
            CheckpointError: a file is missing, damaged or does not fit. Of engines of another library, which read their
                files themselves, other ones may have been changed by then.
        """
        self.wait()
        ranks = ranks.those_in(f"load_state {os.path.basename(input_dir or '')}", needs_all=strategy.layout != "plain")
        engines = _engines(strategy, bundle, load_model_kwargs)
        names = named_parameters(bundle, strategy) if engines is None else []
        folder, states = self._read(input_dir, project, ranks, bundle, names, map_location, load_kwargs)

        strict = bool(load_model_kwargs.get("strict", True))
        manifests: list[Manifest | None] = []
        cursors: list[dict[str, int | str]] = []
        missing: list[str] = []
        custom: list[Any] = []
        weights: list[dict[str, Any]] = []
        models: list[torch.nn.Module] = []

        def check() -> None:
            manifests.append(read_manifest(folder))
            cursors.extend([] if manifests[0] is None else manifests[0].cursors)
            custom.extend(read_custom(folder, self.custom_objects))
            missing.extend(check_states(folder, bundle, states))
            check_cursors(cursors)

        def check_models() -> None:
            by_hooks = strategy.layout == "plain"  # in other layouts, hooks get no models, as they get no weights
            left = list(bundle.models) if by_hooks else []
            for hook in list(self.load_hooks.values()):
                hook(left, str(folder) if input_dir is None else os.path.expanduser(input_dir))
            loaded = left if by_hooks else bundle.models if engines is None else []
            models.extend(strategy.unwrap(model) for model in loaded)
            weights.extend(read_models(folder, models, strict))

        def restore() -> tuple[dict[str, Any], int]:
            warn_of_missing(folder, missing)
            own = replace(bundle, models=models)
            known = restore_parts(own, states, weights, map_location, strategy.restore_model, **load_model_kwargs)
            for one, state in zip(self.custom_objects, custom, strict=True):
                one.load_state_dict(state)
            saved = None if manifests[0] is None else manifests[0].iteration
            return known, finding.next_iteration(project, saved)

        for phase in (check, check_models):
            ranks.together("load_state", phase)
        if engines is not None:
            engines.read(folder)
            load_model_kwargs = {}
        everyones = ranks.together("load_state", restore)
        project.iteration = max(iteration for _, iteration in everyones)
        self.are_of_all = manifests[0] is not None and manifests[0].world_size > 1
        return everyones[ranks.place][0], cursors

    def _read(
        self,
        input_dir: str | os.PathLike[str] | None,
        project: Project,
        ranks: Participants,
        bundle: Bundle,
        models: Sequence[Sequence[tuple[str, torch.Tensor]]],
        map_location: Any,
        load_kwargs: Mapping[str, Any] | None,
    ) -> tuple[Path, SavedStates]:
        """Reads states, and compares checksums; incomplete files are found before anything is changed."""
        read: dict[Path, Future[SavedStates]] = {}

        def why_not(find: Callable[[], Path], by_outline: bool) -> str | None:
            """A collective: the fault that any rank found in its share, which explains why others could not read."""

            def examine() -> tuple[str | None, tuple[str, str]]:
                folder = find()
                read.clear()
                read[folder] = _outcome_of(
                    lambda: read_states(folder, bundle, ranks.topology.rank, map_location, load_kwargs, models)
                )
                reason = why_not_whole(folder, ranks, by_outline)
                manifest = read_manifest(folder) if reason is None else None
                name = folder.name if input_dir is None else os.path.abspath(folder)
                return reason, (name, "" if manifest is None else manifest.origin)

            found = ranks.together("load_state", examine)
            reasons = [reason for reason, _ in found if reason is not None]
            return reasons[0] if reasons else _difference_of([one for _, one in found])

        if input_dir is None:
            finding.newest_whole(project, ranks, lambda folder: why_not(lambda: folder, by_outline=True))
        elif reason := why_not(lambda: finding.given(input_dir), by_outline=False):
            raise CheckpointError(reason)
        ((folder, states),) = read.items()

        def raise_own() -> None:
            states.result()

        ranks.together("load_state", raise_own)
        return folder, states.result()

    def _after_hooks(self, bundle: Bundle, weights: Weights, named: Path, target: Path) -> Weights:
        """Calls the hooks, which may remove weights from the list, and write into ``named``, where ``target`` is."""
        hooks = list(self.save_hooks.values())
        if hooks:
            begin(target)  # also where only other hosts, with disks of their own, have the folder
        for hook in hooks:
            hook(list(bundle.models), weights, str(named))
        return weights

    def _custom_files(self) -> list[StateFile]:
        return [custom_file(index, one.state_dict()) for index, one in enumerate(self.custom_objects)]

    def _agreed(self, what: str, prepared: Callable[[], Checkpoint], ranks: Participants) -> Checkpoint:
        """Rank 0's token on every rank. An exception on any rank is raised on all."""
        own: list[Checkpoint] = []

        def attempt() -> str:
            own.append(prepared())
            return own[0].token

        tokens = ranks.together(what, attempt)
        return replace(own[0], token=tokens[0])


def _place_of(named: Path) -> tuple[Path, Path, bool]:
    """The folder under the name that it was given, where it is, and whether it has to stay itself."""
    target = followed(named)
    return named, target, has_to_stay(target)


def _difference_of(checkpoints: Sequence[tuple[str, str]]) -> str | None:
    """What is wrong with what the ranks have under one name; ``None`` if nothing is, as far as is known.

    Args:
        checkpoints: by rank, the name and the origin. Ranks may load different ones on purpose, by different names.
    """
    known: dict[str, tuple[int, str]] = {}
    for rank, (name, origin) in enumerate(checkpoints):
        if not origin:
            continue
        first, other = known.setdefault(name, (rank, origin))
        if origin != other:
            return (
                f"{name}: rank {first} and rank {rank} have different checkpoints under this name, as machines with "
                "disks of their own do when a save has ended on some of them only; load one that is the same on all, "
                "or copy it to the others"
            )
    return None


def _engines(strategy: Strategy, bundle: Bundle, options: Mapping[str, Any] | None) -> EngineStates | None:
    if strategy.layout != "engines":
        return None
    return EngineStates(strategy, list(bundle.models), dict(options or {}))


def _outcome_of(call: Callable[[], SavedStates]) -> Future[SavedStates]:
    """The result or the exception of ``call``, for later."""
    outcome: Future[SavedStates] = Future()
    try:
        outcome.set_result(call())
    except Exception as error:
        outcome.set_exception(error)
    return outcome


def _added(hooks: dict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
