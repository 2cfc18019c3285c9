"""Finding out which ranks are in the same call, before all of them are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from accelerate_cpp._native import C10dBackend


class Meeting(Protocol):
    """What finds it out; for torch's backends that is :class:`accelerate_cpp.comm.whereabouts.Whereabouts`."""

    def meet(self, topic: str) -> list[int]:
        """The ranks that are in a call on ``topic``, in order. Waits until that is known of all.

        Raises:
            PeerLost: a rank has died, and might have come. Raised once; later, nobody else is there.
            Timeout: it is not known of a rank within the timeout.
        """

    def someone_has_left(self) -> bool:
        """Whether a rank is known to have ended in good order."""


@dataclass(frozen=True)
class CoreMeeting:
    """The same for our communicator, which sees every collective of its ranks."""

    backend: C10dBackend

    def meet(self, topic: str) -> list[int]:
        return self.backend.communicator.meet(topic, self.backend.timeout)

    def someone_has_left(self) -> bool:
        return self.backend.communicator.someone_has_left()
