"""The training that a storm hits: three small steps that go through every phase. A script, or a function of a notebook.

It loads torch late, so that a fault can hit a process that has loaded nothing yet.
"""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.storm.draw import COLLECTIVES, STEPS, TRAININGS, Fault
from tests.storm.inside import FOLDER, Strike

ROWS, FEATURES = 4, 6
SHORT_TIMEOUT = timedelta(seconds=15)
"""Of the process group where a fault shows only by it."""
NEED_TIMEOUT = ("stop", "lost packets", "cut network", "missing collective")
_WITH_LOADERS = ("full /dev/shm", "tiny /dev/shm")


def layers(strike: Strike | None = None, place: list[int] | None = None) -> Any:
    """A model in four blocks, each of which tells when it is in its forward and backward pass."""
    import torch
    from torch import nn

    place = place if place is not None else [0]

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            if strike is not None:
                strike.reach("backward", place[0])
            return gradient.clone()

    class Block(nn.Module):
        def __init__(self, features: int) -> None:
            super().__init__()
            self.linear = nn.Linear(features, FEATURES)

        def forward(self, value: Any) -> Any:
            if strike is not None:
                strike.reach("forward", place[0])
            return torch.tanh(Backward.apply(self.linear(value)))

    torch.manual_seed(0)
    return nn.Sequential(*(Block(FEATURES) for _ in range(4)))


def accelerator(training: str, size: int, folder: str, **arguments: Any) -> Any:
    """The Accelerator of a training, whose checkpoints are in ``folder``."""
    from accelerate_cpp import Accelerator, ParallelismConfig
    from accelerate_cpp.plugins.parallelism import PipelineParallelConfig
    from accelerate_cpp.utils import FullyShardedDataParallelPlugin, ProjectConfiguration

    assert training in TRAININGS
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    if training == "pipeline":
        handler = PipelineParallelConfig(schedule="gpipe", micro_batches=2)
        sizes = {"pp_size": 2} if size == 2 else {"pp_size": 2, "dp_replicate_size": size // 2}
        arguments["parallelism_config"] = ParallelismConfig(**sizes, pp_handler=handler)  # type: ignore[arg-type]
    elif training != "plain":
        kind = {"zero_stage": 2} if training == "ZeRO" else {"fsdp_version": 2}
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            **{"fsdp_version": 2, **kind},  # type: ignore[arg-type]
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            state_dict_type="SHARDED_STATE_DICT",
        )
    return Accelerator(cpu=True, project_config=project, **arguments)


class Registered:
    """An object of the program that goes into checkpoints."""

    def __init__(self, strike: Strike | None, place: list[int]) -> None:
        self._strike, self._place, self.step = strike, place, -1

    def state_dict(self) -> dict[str, int]:
        if self._strike is not None:
            self._strike.reach("save", self._place[0])
        return {"step": self._place[0]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self._strike is not None:
            self._strike.reach("load", self._place[0])
        self.step = state["step"]


def called(run: Any, name: str, step: int) -> None:
    """One of the collectives."""
    import torch
    import torch.distributed as dist

    operand = torch.full((2,), float(step))
    if name == "gather":
        run.gather(operand)
    elif name == "reduce":
        run.reduce(operand, "mean")
    elif name == "broadcast":
        from accelerate_cpp.utils import broadcast

        broadcast(operand)
    elif name == "pad":
        run.pad_across_processes(operand)
    elif name == "gather_for_metrics":
        run.gather_for_metrics(operand)
    elif name == "gather_object":
        from accelerate_cpp.utils import gather_object

        gather_object([step])
    elif name == "broadcast_object":
        from accelerate_cpp.utils import broadcast_object_list

        broadcast_object_list([step])
    elif name == "all_reduce":
        dist.all_reduce(operand)
    elif name == "reduce_scatter":
        dist.reduce_scatter_tensor(torch.empty(2), operand.repeat(dist.get_world_size()))
    elif name == "all_to_all":
        dist.all_to_all_single(torch.empty(2 * dist.get_world_size()), operand.repeat(dist.get_world_size()))
    elif name == "barrier":
        run.wait_for_everyone()


def exchange_messages(step: int) -> None:
    """Each rank sends to the next one, and receives from the one before."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    operand, received = torch.full((2,), float(step)), torch.empty(2)
    for work in (dist.isend(operand, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)):
        assert work is not None
        work.wait()


def data(strike: Strike, shares: int) -> Any:
    """Samples for all steps; whoever reads them tells so."""
    import torch
    from torch.utils.data import Dataset, get_worker_info

    class Samples(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return STEPS * ROWS * shares

        def __getitem__(self, index: int) -> Any:
            strike.reach("data", index // (ROWS * shares), in_loader=get_worker_info() is not None)
            return torch.full((FEATURES,), float(index))

    return Samples()


def tracker(strike: Strike, place: list[int]) -> Any:
    """A tracker that only tells that it was called."""
    from accelerate_cpp.tracking import GeneralTracker

    class Told(GeneralTracker):
        name = "told"
        requires_logging_directory = False

        def __init__(self) -> None:
            super().__init__()

        @property
        def tracker(self) -> None:
            return None

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            return None

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            strike.reach("tracker", place[0])

    return Told()


def needs_timeout(fault: Fault) -> bool:
    """Whether the fault shows only when the timeout of the process group is over.

    So do, on several hosts and through MPI, ends before the group has formed: launchers that were started by others do
    not know each other. torch's launcher knows all ranks, but a rank that ends with exit code 0 has done well for it.
    """
    is_early = fault.phase in ("import", "start", "prepare")
    is_unseen = fault.start == "torchrun" and fault.kind in ("sys.exit(0)", "os._exit(0)")
    return fault.kind in NEED_TIMEOUT or (is_early and (fault.start in ("hosts", "mpirun") or is_unseen))


def train() -> None:
    """Trains, with the fault of the environment."""
    strike = Strike.of_environment()
    fault = strike.fault
    is_script = fault.start not in ("notebook", "kernel")
    if is_script:
        atexit.register(strike.reach, "exit", 0)  # the first to be registered is the last to be called
    strike.reach("import", 0)
    import torch
    from torch.utils.data import DataLoader

    from accelerate_cpp.utils import InitProcessGroupKwargs

    strike.reach("start", 0)
    place = [0]
    handlers = [InitProcessGroupKwargs(timeout=SHORT_TIMEOUT)] if needs_timeout(fault) else []
    run = accelerator(
        fault.training,
        fault.size,
        str(Path(os.environ[FOLDER], "project")),
        kwargs_handlers=handlers,
        log_with=tracker(strike, place),
    )
    run.init_trackers("storm")
    strike.reach("prepare", 0)
    model = layers(strike, place)
    shares = fault.size // 2 if fault.training == "pipeline" else fault.size
    workers = int(fault.phase == "data" or fault.kind in _WITH_LOADERS)
    loader = DataLoader(data(strike, shares), batch_size=ROWS, num_workers=workers)
    model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    run.register_for_checkpointing(Registered(strike, place))
    strike.reach("loader", 0)  # its processes are the first to need what is in /dev/shm
    for step, batch in zip(range(STEPS), loader, strict=False):
        place[0] = step
        one_step(run, strike, step, model, optimizer, batch)
        print("step", step, "of rank", run.process_index, flush=True)
    strike.reach("end", 0)
    run.end_training()
    if not is_script:
        strike.reach("exit", 0)


def one_step(run: Any, strike: Strike, step: int, model: Any, optimizer: Any, batch: Any) -> None:
    """A step with all its phases."""
    fault = strike.fault
    if fault.training == "pipeline":
        run.train_batch(batch, squares, batch, model=model)
    else:
        run.backward(squares(model(batch), batch))
    strike.reach("step", step)
    optimizer.step()
    optimizer.zero_grad()
    for name, other in zip(COLLECTIVES, COLLECTIVES[1:] + COLLECTIVES[:1], strict=True):
        if not strike.reach(name, step):
            called(run, name, step)
        elif fault.kind == "mismatched collective":
            called(run, other, step)
    strike.reach("message", step)
    exchange_messages(step)
    run.log({"step": step}, step=step)
    if not (strike.happens_inside and run.is_main_process):
        strike.reach("save", step)
    run.save_state()
    if fault.phase == "load" and step == fault.step:
        if not strike.happens_inside:
            strike.reach("load", step)
        run.load_state(newest(fault) if fault.named else None)


def squares(outputs: Any, targets: Any) -> Any:
    """The loss."""
    return (outputs - targets).square().mean()


def newest(fault: Fault) -> str:
    """The path of the newest checkpoint."""
    return str(Path(os.environ[FOLDER], "project", "checkpoints", f"checkpoint_{fault.step}"))


if __name__ == "__main__":
    train()
