"""Which fault hits which run: all of it drawn from a seed and the number of the run."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from typing import Any

SIGNALS = ("KILL", "TERM", "INT", "HUP", "QUIT")
KINDS = (
    *SIGNALS,
    "stop and continue",
    "stop",
    "sys.exit(0)",
    "os._exit(0)",
    "os._exit(3)",
    "exception",
    "segfault",
    "out of memory",
    "mismatched collective",
    "missing collective",
    "full /dev/shm",
    "tiny /dev/shm",
    "full disk",
    "no descriptors",
    "read-only folder",
    "closed stdout",
    "truncated checkpoint",
    "flipped checkpoint",
    "lost packets",
    "cut network",
    "clock set back",
)
COLLECTIVES = (
    "gather",
    "reduce",
    "broadcast",
    "pad",
    "gather_for_metrics",
    "gather_object",
    "broadcast_object",
    "all_reduce",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)
BEFORE, LOOP, AFTER = (
    ("import", "start", "prepare", "loader"),
    ("data", "forward", "backward", "step", *COLLECTIVES, "message", "tracker", "save", "load"),
    ("end", "exit"),
)
PHASES = (*BEFORE, *LOOP, *AFTER)
STARTS = ("launch", "torchrun", "notebook", "kernel", "mpirun", "hosts")
TRAININGS = ("plain", "FSDP2", "ZeRO", "pipeline")
STEPS = 3
LONGEST_DELAY = 0.4  # seconds
LAUNCHER = -1
"""The rank that stands for the process that was started by hand."""

# In the process of a data loader a fault is that process's. What it cannot do by itself is done to none of them.
_IN_DATA = ("KILL", "TERM", "stop", "sys.exit(0)", "os._exit(0)", "os._exit(3)", "exception", "segfault")
_OF_LAUNCHERS = ("KILL", "TERM", "INT", "HUP", "QUIT")
_IN_PLACE = {
    "mismatched collective": COLLECTIVES,
    "missing collective": COLLECTIVES,
    "full disk": ("save",),
    "read-only folder": ("save",),
    "truncated checkpoint": ("load",),
    "flipped checkpoint": ("load",),
    "full /dev/shm": ("loader",),
    "tiny /dev/shm": ("loader",),
}
_ANYWHERE_IN_LOOP = ("lost packets", "cut network", "no descriptors", "closed stdout", "clock set back")
# What Python does not do any more, or what no process reads any more, once the interpreter ends.
_NOT_AT_EXIT = ("sys.exit(0)", "exception", "INT")


@dataclass(frozen=True)
class Fault:
    """One fault and the run that it hits.

    Attributes:
        rank: of the process that it hits; :data:`LAUNCHER` for the one that has started the others.
        step: in which of the three steps of the training, where the phase is part of one.
        within: it comes from outside, ``delay`` seconds after the rank has entered the phase, where it waits for
            the others; otherwise the rank does it to itself when it gets there.
        named: checkpoints are loaded by name, not the newest that is whole.
        percent: how many packets are lost.
    """

    seed: int
    index: int
    kind: str
    phase: str
    step: int
    rank: int
    size: int
    start: str
    training: str
    within: bool
    delay: float
    named: bool
    percent: int

    def render(self) -> str:
        """The fault as a line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, line: str) -> Fault:
        """The fault that :meth:`render` has written."""
        known: dict[str, Any] = json.loads(line)
        return cls(**known)


def _phases_of(kind: str) -> tuple[str, ...]:
    if kind in _IN_PLACE:
        return _IN_PLACE[kind]
    if kind in _ANYWHERE_IN_LOOP:
        return tuple(phase for phase in LOOP if phase != "data")
    return tuple(
        phase
        for phase in PHASES
        if (phase != "data" or kind in _IN_DATA)
        and (phase != "exit" or kind not in _NOT_AT_EXIT)
        and (phase not in AFTER or kind != "stop")  # nobody waits for it there
    )


def draw(seed: int, index: int) -> Fault:
    """Fault ``index`` of the storm ``seed``. Each kind comes once in so many faults as there are kinds."""
    order = list(KINDS)
    random.Random(f"{seed}/{index // len(KINDS)}").shuffle(order)
    chance = random.Random(f"{seed}:{index}")
    kind = order[index % len(KINDS)]
    phases = _phases_of(kind)
    phase = chance.choice(
        [phase for phase in phases if phase not in COLLECTIVES] + ["collective"] * bool({*phases} & {*COLLECTIVES})
    )
    collective = chance.choice(COLLECTIVES)
    phase = collective if phase == "collective" else phase
    start = chance.choice(STARTS)
    if kind in ("lost packets", "cut network"):
        start = "hosts"
    if kind == "closed stdout" and start == "kernel":
        start = "notebook"  # a kernel sends messages
    training = chance.choice(TRAININGS)
    sizes = (2, 4) if start == "hosts" or training == "pipeline" else (2, 2, 3, 4)
    size = chance.choice(sizes)
    if kind == "stop" and start == "hosts":
        size = 4  # a rank that is alone on its host is missed by nobody there
    rank = chance.randrange(size)
    if phase == "tracker":
        rank = 0  # trackers are the main process's
    within = chance.random() < 0.5
    hits_launcher = chance.random() < 0.15
    if hits_launcher and kind in _OF_LAUNCHERS and phase != "data" and not (start == "torchrun" and kind == "KILL"):
        rank, within = LAUNCHER, True  # torch's agent, killed, leaves its workers to themselves
    if phase == "data":
        within = False
    return Fault(
        seed=seed,
        index=index,
        kind=kind,
        phase=phase,
        step=chance.randrange(1, STEPS) if phase == "load" else chance.randrange(STEPS),
        rank=rank,
        size=size,
        start=start,
        training=training,
        within=within,
        delay=round(chance.uniform(0, LONGEST_DELAY), 3),
        named=chance.random() < 0.5,
        percent=chance.choice((5, 10, 20, 30)),
    )
