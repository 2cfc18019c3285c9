"""Checks of distributed checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from features_common import Ranks, batch, check, check_weights, network, train, whole


def trained(mesh: DeviceMesh, ranks: Ranks) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model after some training, and its optimizer, which has a state."""
    module = fully_shard(network(), mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    train(module, optimizer, part=ranks.rank, parts=ranks.size)
    return module, optimizer


def fresh(mesh: DeviceMesh | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One with other weights."""
    torch.manual_seed(7)
    module = type(network())()
    if mesh is not None:
        fully_shard(module, mesh=mesh)
    for parameter in module.parameters():
        nn.init.constant_(parameter, 9.0)
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, optim = get_state_dict(module, optimizer)
    return {"model": model, "optim": optim, "step": torch.tensor(4), "note": {"epoch": 2}}


def load(folder: Any, module: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    state = state_of(module, optimizer)
    state["step"], state["note"] = torch.tensor(0), {"epoch": 0}
    dcp.load(state, checkpoint_id=folder, **options)
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    check(state["step"], torch.tensor(4))
    assert state["note"] == {"epoch": 2}


def check_equal(ours: tuple[nn.Module, Any], theirs: tuple[nn.Module, Any]) -> None:
    """Equal weights, and equal ones after one more step: so the optimizers' states are equal, too."""
    for _ in range(2):
        for own, other in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
            check(whole(own.detach()), whole(other.detach()), 1e-6)
        for module, optimizer in (ours, theirs):
            inputs, targets = batch(9)
            nn.functional.mse_loss(module(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()


def save_and_load(ranks: Ranks) -> None:
    mesh = ranks.mesh()
    saved, loaded = trained(mesh, ranks), fresh(mesh)
    dcp.save(state_of(*saved), checkpoint_id=ranks.folder)
    load(ranks.folder, *loaded)
    check_equal(loaded, saved)


def data_parallel(ranks: Ranks) -> None:
    """Equal tensors on all ranks are written once."""
    module, other = DDP(network()), DDP(fresh(None)[0])
    train(module, part=ranks.rank, parts=ranks.size)
    dcp.save(get_model_state_dict(module), checkpoint_id=ranks.folder)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=ranks.folder)
    set_model_state_dict(other, state)
    check_weights(other, module, 0.0)
    size = sum(parameter.nbytes for parameter in module.parameters())
    written = sum(file.stat().st_size for file in ranks.folder.glob("*.distcp"))
    assert written < 2 * size + 20_000


def from_a_thread(ranks: Ranks) -> None:
    """Training goes on while a thread writes, with collectives of its own in a group of its own."""
    mesh, group = ranks.mesh(), dist.new_group()
    saved = trained(mesh, ranks)
    writing = dcp.async_save(state_of(*saved), checkpoint_id=ranks.folder, process_group=group)
    copies = [whole(parameter.detach()).clone() for parameter in saved[0].parameters()]
    train(saved[0], saved[1], part=ranks.rank, parts=ranks.size)
    writing.result()
    loaded = fresh(mesh)
    load(ranks.folder, *loaded)
    check([whole(parameter.detach()) for parameter in loaded[0].parameters()], copies)


def from_a_process(ranks: Ranks) -> None:
    """Two checkpoints by one writing process per rank, whose own group torch makes over Gloo."""
    mesh = ranks.mesh()
    saved = trained(mesh, ranks)
    for turn in ("first", "second"):
        writing = dcp.async_save(
            state_of(*saved),
            checkpoint_id=ranks.folder / turn,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        writing.result()
    loaded = fresh(mesh)
    load(ranks.folder / "second", *loaded)
    check_equal(loaded, saved)


def on_fewer_ranks(ranks: Ranks) -> None:
    """Saved by four ranks; loaded by two, and by one without any group."""
    saved = trained(ranks.mesh(), ranks)
    dcp.save(state_of(*saved), checkpoint_id=ranks.folder)
    expected = [whole(parameter.detach()) for parameter in saved[0].parameters()]
    pair = dist.new_group([0, 1])
    if ranks.rank < 2:
        mesh = DeviceMesh.from_group(pair, "cpu", mesh_dim_names=("dp",))
        loaded = fresh(mesh)
        load(ranks.folder, *loaded, process_group=pair)
        check([whole(parameter.detach()) for parameter in loaded[0].parameters()], expected)
    if ranks.rank == 3:
        alone = fresh(None)
        state = {"model": alone[0].state_dict()}
        dcp.load(state, checkpoint_id=ranks.folder, no_dist=True)
        check([parameter.detach() for parameter in alone[0].parameters()], expected)
    dist.barrier()


def on_another_mesh(ranks: Ranks) -> None:
    """Saved with shards over four ranks, loaded with replicas of shards over two, and the other way round."""
    flat, hybrid = ranks.mesh(), ranks.mesh(2, 2, names=("replicate", "shard"))
    for turn, (source, target) in enumerate(((flat, hybrid), (hybrid, flat))):
        saved, loaded = trained(source, ranks), fresh(target)
        dcp.save(state_of(*saved), checkpoint_id=ranks.folder / str(turn))
        load(ranks.folder / str(turn), *loaded)
        check_equal(loaded, saved)


def whole_state(ranks: Ranks) -> None:
    """The state gathered on rank 0, and spread again from there."""
    mesh = ranks.mesh()
    saved, loaded = trained(mesh, ranks), fresh(mesh)
    gathering = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optim = (
        get_model_state_dict(saved[0], options=gathering),
        get_optimizer_state_dict(*saved, options=gathering),
    )
    assert bool(model) == (ranks.rank == 0)
    # On a CPU the step counts would be the same tensors in both optimizers.
    model, optim = copy.deepcopy((model, optim))
    spreading = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(loaded[0], model, options=spreading)
    set_optimizer_state_dict(*loaded, optim, options=spreading)
    check_equal(loaded, saved)


def as_one_file(ranks: Ranks) -> None:
    """The checkpoint turned into a file that torch.load reads."""
    saved = trained(ranks.mesh(), ranks)
    dcp.save(state_of(*saved), checkpoint_id=ranks.folder / "parts")
    expected = {name: whole(parameter.detach()) for name, parameter in saved[0].named_parameters()}
    if ranks.rank == 0:
        dcp_to_torch_save(ranks.folder / "parts", ranks.folder / "whole.pt")
        check(torch.load(ranks.folder / "whole.pt", weights_only=False)["model"], expected)
    dist.barrier()
