"""What can be sent to another process of a session."""

from __future__ import annotations

import pickle

import torch

from accelerate_cpp.comm.topology import Topology
from accelerate_cpp.config.session_config import SessionConfig
from accelerate_cpp.parallel.single import SingleStrategy
from accelerate_cpp.precision.precision import precision_for
from accelerate_cpp.runtime.session import Session, remember


def test_a_session_is_remembered_as_states_see_it_and_can_be_pickled() -> None:
    device, topology = torch.device("cpu"), Topology(rank=1, world_size=2, backend="shm")
    config = SessionConfig(cpu=True, mixed_precision="bf16", fork_launched=True)
    found = remember(Session(config, topology, device, SingleStrategy(), precision_for("bf16", device)))
    assert found is not None
    assert (found.topology, found.device) == (topology, device)
    for name in ("cpu", "debug", "fork_launched", "mixed_precision"):
        assert getattr(found.config, name) == getattr(config, name)
    assert pickle.loads(pickle.dumps(found)) == found
    assert remember(found) is found
    assert remember(None) is None
