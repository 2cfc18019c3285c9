"""Runs the checks of ``features_table`` in real processes, and writes the table in the documentation.

``python tests/distributed/torch_features.py`` rewrites ``docs/torch_features.md``.
"""

from __future__ import annotations

import faulthandler
import fcntl
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from features_table import AREAS, Feature, function_of
from processes import Outcome, start_processes
from scenarios import outlive_the_others

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "torch_features.md"
# Of one check, after which its process says where it hangs and ends; and of one start.
CHECK_SECONDS = 300
START_SECONDS = 1500

# A Gloo group dies with the whole process when a hook of DDP, called in a thread of the group, had the last reference.
KEPT_GROUPS: list[Any] = []

Check = Callable[[Any], None]


def run_features(backend: str, names: Sequence[str], folder: str) -> None:
    """Called in each process: the checks of these features, one after the other."""
    # Before the first group is made: some functions of torch have the default group of their import as a default value.
    run({name: function_of(name) for name in names}, backend, folder)


def run(checks: Mapping[str, Check], backend: str, folder: str) -> None:
    """Runs each check in a default group of its own, and writes its traceback, or nothing, into ``<name>.<rank>``.

    A rank begins a check when all have ended the one before, however long they waited for each other there.
    """
    import torch.distributed as dist

    from features_common import Ranks

    if backend == "shm":
        from accelerate_cpp.comm.backend import register

        register()
    warnings.simplefilter("ignore")
    here = Path(folder)
    store, rank, size = next(dist.rendezvous("env://"))
    with (here / f"starting.{rank}").open("w") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        (here / f"starting.{rank}").rename(here / f"alive.{rank}")
        for name, check in checks.items():
            faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True)
            own = dist.PrefixStore(name, store)
            ranks = Ranks(backend, rank, size, here / f"files of {name}", dist.PrefixStore("events", own))
            (here / f"{name}.{rank}").write_text(failure_of(check, ranks, own))
            wait_for_all(here, name, size)
        faulthandler.cancel_dump_traceback_later()
        outlive_the_others(store, rank, size)


def wait_for_all(folder: Path, name: str, size: int) -> None:
    """Returns when every rank has ended the check; ends this process when another one has died in it."""
    files = [folder / f"{name}.{rank}" for rank in range(size)]
    while missing := [rank for rank, file in enumerate(files) if not file.exists()]:
        for rank in missing:
            if is_dead(folder, rank) and not files[rank].exists():
                sys.exit(f"rank {rank} ended in {name}")
        time.sleep(0.01)


def is_dead(folder: Path, rank: int) -> bool:
    """Whether the process has ended that holds this lock while it lives. Its lock appears when it is held."""
    try:
        with (folder / f"alive.{rank}").open() as alive:
            fcntl.flock(alive, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return False
    return True


def failure_of(check: Check, ranks: Any, store: Any) -> str:
    """The traceback of a check that fails, or nothing."""
    import torch.distributed as dist

    from features_common import TIMEOUT

    ranks.folder.mkdir(exist_ok=True)
    try:
        dist.init_process_group(ranks.name, store=store, rank=ranks.rank, world_size=ranks.size, timeout=TIMEOUT)
        check(ranks)
    except BaseException:
        return traceback.format_exc()
    finally:
        if dist.is_initialized():
            if ranks.backend == "gloo":
                KEPT_GROUPS.extend(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()
    return ""


def failures(
    worker: Callable[[str, Sequence[str], str], None],
    processes: int,
    backend: str,
    names: Sequence[str],
    folder: Path,
) -> dict[str, str]:
    """What went wrong with each feature, or nothing, by name.

    When a process ends in mid-check, or hangs, that is the failure of this check, and others begin anew with the rest.
    """
    reports: dict[str, str] = {}
    remaining = list(names)
    while remaining:
        own = folder / str(len(reports))
        own.mkdir()
        outcomes = start_processes(worker, processes, backend, remaining, str(own), timeout=START_SECONDS, fresh=True)
        files = {name: [own / f"{name}.{rank}" for rank in range(processes)] for name in remaining}
        finished = [name for name in remaining if all(file.exists() for file in files[name])]
        for name in finished:
            texts = [(rank, file.read_text()) for rank, file in enumerate(files[name])]
            reports[name] = "\n".join(f"rank {rank}: {text}" for rank, text in texts if text)
        remaining = [name for name in remaining if name not in finished]
        if remaining:
            reports[remaining.pop(0)] = "".join(map(ending, outcomes))
        elif any(outcome.exit_code for outcome in outcomes):
            reports[finished[-1]] += "".join(map(ending, outcomes))
    return reports


def ending(outcome: Outcome) -> str:
    return f"\n--- rank {outcome.rank} ended with {outcome.exit_code}\n{outcome.stdout}{outcome.stderr}"


HEADER = """\
# What of torch.distributed runs on backend `shm`

Each row is a test with real processes, of `make test-full`. A row that says no is tested to be refused. A row that
names no number of processes runs with two.

Generated from `tests/distributed/features_table.py`: run `python tests/distributed/torch_features.py` after a change.
"""


def document() -> str:
    """The text of ``docs/torch_features.md``."""
    return "\n".join([HEADER, *document_lines()])


def document_lines() -> Iterator[str]:
    for area in AREAS:
        yield f"## {area.title}\n"
        yield "| Feature | Runs on `shm` | What is compared |"
        yield "|---|---|---|"
        for feature in area.features:
            yield f"| {feature.name} | {verdict(feature)} | {feature.how}{circumstances(feature)} |"
        yield ""


def verdict(feature: Feature) -> str:
    return f"no: {feature.refusal}" if feature.refusal else "yes"


def circumstances(feature: Feature) -> str:
    notes = [f"{feature.processes} processes"] if feature.processes != 2 else []
    return f" ({', '.join(notes)})" if notes else ""


if __name__ == "__main__":
    DOCUMENT.write_text(document())
