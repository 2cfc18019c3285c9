"""The part of a session that pickled states know in a process without one, such as a Ray worker."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accelerate_cpp.runtime.session import Session
from accelerate_cpp.runtime.topology import Topology


class Choices(NamedTuple):
    """The part of a session's configuration that states tell."""

    cpu: bool
    debug: bool
    fork_launched: bool
    mixed_precision: str | None


class Remembered(NamedTuple):
    """A session as states see it."""

    config: Choices
    topology: Topology
    device: torch.device


def remember(session: Session | Remembered | None) -> Remembered | None:
    """What can be sent to another process of ``session``; ``None`` of none."""
    if session is None or isinstance(session, Remembered):
        return session
    config = session.config
    choices = Choices(config.cpu, config.debug, config.fork_launched, config.mixed_precision)
    return Remembered(choices, session.topology, session.device)
