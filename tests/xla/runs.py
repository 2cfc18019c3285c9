"""What the processes of these tests do, on devices of torch_xla or, with ``cpu``, without it."""

from __future__ import annotations

import os
from typing import Any

import torch


def _set() -> torch.utils.data.Dataset[Any]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.utils.data.TensorDataset(
        torch.tensor(digits.data[:250], dtype=torch.float32) / 16, torch.tensor(digits.target[:250])
    )


class Tied(torch.nn.Module):
    """Digits through two layers with one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.last = torch.nn.Linear(64, 10)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = torch.tanh(self.second(torch.tanh(self.first(rows)))) * self.scale
        scores: torch.Tensor = self.last(hidden)
        return scores


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Trains on digits; the last batch of a pass is shorter.

    Args:
        options: ``cpu``, ``steps_each``, ``max_norm``, ``precision``, ``spmd``, ``plugin`` and ``folder`` to save to,
            after the first pass, and with ``loads`` to load from instead of training it.
    """
    if options.get("spmd"):
        import torch_xla.runtime

        torch_xla.runtime.use_spmd()
    from accelerate_cpp import Accelerator
    from accelerate_cpp.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if options.get("plugin") else None
    if plugin is not None:
        plugin.auto_wrap_policy = lambda module, recurse, nonwrapped_numel: isinstance(module, torch.nn.Linear)
    accelerator = Accelerator(
        cpu=options.get("cpu", False),
        gradient_accumulation_steps=options.get("steps_each", 1),
        mixed_precision=options.get("precision"),
        fsdp_plugin=plugin,
    )
    model = Tied()
    weight = model.first.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # of parameters that are not on the device yet
    order = torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(_set(), batch_size=32, shuffle=True, generator=order)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, ends, devices = [], [], set()
    for epoch in range(2):
        if epoch == 0 and options.get("loads"):
            accelerator.load_state(options["folder"])
            continue
        for rows, labels in loader:
            devices.add(rows.device.type)
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(rows), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients and "max_norm" in options:
                    accelerator.clip_grad_norm_(model.parameters(), options["max_norm"])
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            ends.append((len(rows), accelerator.gradient_state.end_of_dataloader))
        if epoch == 0 and "folder" in options:
            accelerator.save_state(options["folder"])
    inner = accelerator.unwrap_model(model)
    return {
        "losses": [loss.item() for loss in losses],
        "ends": ends,
        "state": {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()},
        "tied": inner.first.weight is inner.second.weight and inner.first.weight is weight,
        "devices": devices,
        "type": accelerator.distributed_type.value,
        "processes": accelerator.num_processes,
        "dtype": str(accelerator.unwrap_model(model)(rows).dtype),
        "sharding": _sharding(inner.first.weight),
    }


def _sharding(weight: torch.Tensor) -> str:
    if weight.device.type != "xla":
        return ""
    import torch_xla

    return str(torch_xla._XLAC._get_xla_sharding_spec(weight))


def rows_that_fail() -> str:
    """The error of a dataset that cannot read its fifth sample, as the loop hears of it."""
    from accelerate_cpp import Accelerator

    class Rows(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 5:
                raise OSError("sample 5 is unreadable")
            return torch.ones(2)

    accelerator = Accelerator()
    loader = accelerator.prepare(torch.utils.data.DataLoader(Rows(), batch_size=2))
    taken = 0
    try:
        for _ in loader:
            taken += 1
    except OSError as error:
        return f"{taken} {error}"
    return "nothing was raised"


def left_early() -> tuple[int, int, bool]:
    """A loop that is left, and another after it: batches of each; and whether the loader is torch_xla's."""
    import torch_xla.distributed.parallel_loader

    from accelerate_cpp import Accelerator, skip_first_batches

    accelerator = Accelerator()
    loader = accelerator.prepare(torch.utils.data.DataLoader(_set(), batch_size=10))
    for count, _ in enumerate(loader, 1):
        if count == 3:
            break
    rest = sum(1 for _ in skip_first_batches(loader, 20))
    return count, rest, isinstance(loader, torch_xla.distributed.parallel_loader.MpDeviceLoader)


def seeds(folder: str) -> tuple[bool, bool]:
    """Whether random numbers of the device come back with a state, and with a seed."""
    from accelerate_cpp import Accelerator
    from accelerate_cpp.utils import set_seed

    accelerator = Accelerator()

    def drawn() -> torch.Tensor:
        return torch.rand(4, device=accelerator.device).cpu()

    set_seed(7)
    accelerator.save_state(folder)
    first = drawn()
    accelerator.load_state(folder)
    loaded = drawn()
    set_seed(7)
    return torch.equal(first, loaded), torch.equal(first, drawn())


def downcast() -> tuple[float, bool, str]:
    """What 1.0001 becomes in the memory of the device."""
    from accelerate_cpp import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    kept = (torch.tensor([1.0001]).to(accelerator.device) * 1.0).item()
    return kept, accelerator.state.downcast_bfloat, os.environ["XLA_DOWNCAST_BF16"]


def refusals() -> list[str]:
    """What cannot be had, and what the error says."""
    from accelerate_cpp import Accelerator
    from accelerate_cpp.state import AcceleratorState
    from accelerate_cpp.utils import FullyShardedDataParallelPlugin

    found = []
    for options in ({"mixed_precision": "fp16"}, {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}):
        try:
            Accelerator(**options)
        except ValueError as error:
            found.append(str(error))
        AcceleratorState._reset_state()
    return found


def one_collective() -> list[Any]:
    """Collectives of one process, and what is asked of its device."""
    from accelerate_cpp import Accelerator
    from accelerate_cpp.devices.table import kind_of

    accelerator = Accelerator()
    tensor = torch.tensor([1.0, 2.0], device=accelerator.device)
    kind = kind_of(accelerator.device)
    kind.synchronize()
    accelerator.wait_for_everyone()
    return [
        accelerator.gather(tensor).tolist(),
        accelerator.reduce(tensor, "mean").tolist(),
        kind.name_of(0),
        kind.count(),
        kind.current(),
        kind.allocated_bytes() >= 0,
        kind.free_bytes(0) >= 0,
        kind.is_initialized(),
    ]


def already_sharded() -> tuple[list[str], float, bool]:
    """A model in torch_xla's own FSDP of version 1: names in its state, a norm that it clips, and whether it steps."""
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    from accelerate_cpp import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = XlaFullyShardedDataParallel(torch.nn.Linear(4, 1, bias=False).to(accelerator.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    accelerator.backward(model(torch.ones(1, 4, device=accelerator.device)).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    moved = any(not torch.equal(old, new.detach().cpu()) for old, new in zip(before, model.parameters(), strict=True))
    return [type(accelerator.unwrap_model(model)).__name__], float(norm), moved


def _open(rank: int) -> None:
    from accelerate_cpp import Accelerator

    Accelerator()


def spawned() -> None:
    """An Accelerator in each process of torch_xla's launcher."""
    import torch_xla.distributed.xla_multiprocessing as launcher

    launcher.spawn(_open, start_method="fork")
