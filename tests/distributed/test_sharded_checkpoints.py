"""Checkpoints of sharded runs: their files, other numbers of processes, other layouts, and the original's reader."""

from __future__ import annotations

import os
import platform
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes import run_processes, start_processes
from test_sharded_training import accelerator, decoder, loss_of, same, words

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
BEFORE, AFTER = 3, 3


def plain_accelerator() -> Any:
    from accelerate_cpp import Accelerator
    from accelerate_cpp.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True)


def run_of(kind: str) -> Any:
    """Plain, or in shards with this type of state dicts; ``HSDP`` is two copies in two shards each, in ``regions``
    blocks are compiled one by one, and the others have parts of their own names.
    """
    from accelerate_cpp import ParallelismConfig
    from accelerate_cpp.utils import TorchDynamoPlugin

    if kind == "plain":
        return plain_accelerator()
    if kind == "HSDP":
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        return accelerator({"state_dict_type": "SHARDED_STATE_DICT"}, parallelism_config=config)
    if kind == "regions":
        plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
        return accelerator({"state_dict_type": "SHARDED_STATE_DICT"}, dynamo_plugin=plugin)
    if kind == "once per host":
        return accelerator({"state_dict_type": "SHARDED_STATE_DICT", "weights_once_per_host": True})
    if kind in ("ZeRO", "ZeRO, whole"):
        chosen = "SHARDED_STATE_DICT" if kind == "ZeRO" else "FULL_STATE_DICT"
        return accelerator({"state_dict_type": chosen, "zero_stage": 2})
    return accelerator({"state_dict_type": kind})


def adamw(parameters: Any) -> Any:
    """Whose steps do not magnify the rounding of small gradients."""
    import torch

    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def halved(optimizer: Any) -> Any:
    """A schedule that, unlike others, does not advance faster with more processes."""
    import torch

    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)


def step(run: Any, model: Any, optimizer: Any, schedule: Any, number: int, shares: int) -> float:
    """One step on the same global batch, however many processes there are."""
    import torch

    batch = torch.cat([words(number, share) for share in range(shares)])
    own = batch.chunk(run.num_processes)[run.process_index]
    loss = loss_of(model, own)
    run.backward(loss)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return float(run.reduce(loss.detach(), "mean").item())


def prepared(run: Any, seed: int) -> tuple[Any, Any, Any]:
    model = decoder(seed=seed)
    optimizer = adamw(model.parameters())
    schedule = halved(optimizer)
    return run.prepare(model, optimizer, schedule)


SHARES = 12  # divisible by 1, 2, 3 and 4


def save(kind: str, folder: str, blocking: bool = True) -> dict[str, Any]:
    """Trains, saves, and trains on: the losses after the checkpoint, and the files of it."""
    import torch

    run = run_of(kind)
    model, optimizer, schedule = prepared(run, seed=1)
    for number in range(BEFORE):
        step(run, model, optimizer, schedule, number, SHARES)
    with torch.no_grad():
        loss_of(model, words(0, 0))  # after which torch keeps the parameters of the root whole
    run.save_state(folder, blocking=blocking)
    losses = [step(run, model, optimizer, schedule, BEFORE + number, SHARES) for number in range(AFTER)]
    run.wait_for_checkpoint()
    run.wait_for_everyone()
    files = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
    return {"losses": losses, "files": files}


def load(kind: str, folder: str, on_meta: bool = False, hooked: bool = False) -> list[float]:
    """Loads into other weights, and trains on; ``hooked`` as programs do that load adapters themselves."""
    import torch

    run = run_of(kind)
    if on_meta:
        from training_patterns import zoo

        with torch.device("meta"):
            model: Any = zoo().Decoder()
        optimizer = adamw(model.parameters())
        model, optimizer, schedule = run.prepare(model, optimizer, halved(optimizer))
    else:
        model, optimizer, schedule = prepared(run, seed=2)
    with torch.no_grad():
        loss_of(model, words(0, 0)) if not on_meta else None
    if hooked:
        run.register_load_state_pre_hook(lambda models, _folder: models.clear())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*torch.distributed is disabled")
        run.load_state(folder)
    return [step(run, model, optimizer, schedule, BEFORE + number, SHARES) for number in range(AFTER)]


def losses_after(outcome: list[Any]) -> list[float]:
    assert all(one == outcome[0] for one in outcome)
    return list(outcome[0])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Of two ranks, by kind."""
    folder = tmp_path_factory.mktemp("checkpoints")
    kinds = (*KINDS, "plain", "ZeRO")
    return {kind: (folder / kind, run_processes(save, 2, kind, str(folder / kind))[0]) for kind in kinds}


def test_the_files_are_the_originals(checkpoints: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    common = ["accelerate_cpp.json", "random_states_0.pkl", "random_states_1.pkl", "scheduler.bin"]
    whole = ["optimizer.bin", "pytorch_model_fsdp.bin"]
    parts = [
        f"{part}/{name}"
        for part in ("optimizer_0", "pytorch_model_fsdp_0")
        for name in (".metadata", "__0_0.distcp", "__1_0.distcp")
    ]
    assert checkpoints["FULL_STATE_DICT"][1]["files"] == sorted([*common, *whole])
    assert checkpoints["SHARDED_STATE_DICT"][1]["files"] == sorted([*common, *parts])


LONG = pytest.mark.long
PAIRS = [
    ("SHARDED_STATE_DICT", "SHARDED_STATE_DICT", 3),
    ("SHARDED_STATE_DICT", "plain", 1),
    ("FULL_STATE_DICT", "SHARDED_STATE_DICT", 4),
    ("plain", "FULL_STATE_DICT", 2),
    ("ZeRO", "SHARDED_STATE_DICT", 3),
    ("ZeRO", "plain", 1),
    ("SHARDED_STATE_DICT", "ZeRO", 4),
    ("plain", "once per host", 3),
    pytest.param("ZeRO", "ZeRO", 2, marks=LONG),
    pytest.param("ZeRO", "once per host", 4, marks=LONG),
    pytest.param("FULL_STATE_DICT", "ZeRO, whole", 3, marks=LONG),
    pytest.param("SHARDED_STATE_DICT", "SHARDED_STATE_DICT", 2, marks=LONG),
    pytest.param("SHARDED_STATE_DICT", "plain", 2, marks=LONG),
    pytest.param("SHARDED_STATE_DICT", "FULL_STATE_DICT", 2, marks=LONG),
    pytest.param("FULL_STATE_DICT", "FULL_STATE_DICT", 2, marks=LONG),
    pytest.param("FULL_STATE_DICT", "plain", 1, marks=LONG),
    pytest.param("plain", "SHARDED_STATE_DICT", 2, marks=LONG),
    pytest.param("plain", "FULL_STATE_DICT", 3, marks=LONG),
]


@pytest.mark.parametrize(("written", "read", "ranks"), PAIRS)
def test_training_continues_in_another_layout_and_number(
    checkpoints: dict[str, tuple[Path, dict[str, Any]]], written: str, read: str, ranks: int
) -> None:
    folder, outcome = checkpoints[written]
    same(losses_after(run_processes(load, ranks, read, str(folder))), outcome["losses"], 1e-4)


@pytest.mark.parametrize("kind", [*KINDS, "ZeRO"])
def test_a_model_on_the_meta_device_gets_its_weights_from_a_checkpoint(
    checkpoints: dict[str, tuple[Path, dict[str, Any]]], kind: str
) -> None:
    folder, outcome = checkpoints[kind]
    same(losses_after(run_processes(load, 2, kind, str(folder), True)), outcome["losses"], 1e-4)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "ZeRO"])
def test_hooks_do_not_take_models_in_shards_from_what_is_loaded(
    checkpoints: dict[str, tuple[Path, dict[str, Any]]], kind: str
) -> None:
    """The original gives its hooks none of them."""
    folder, outcome = checkpoints[kind]
    same(losses_after(run_processes(load, 2, kind, str(folder), False, True)), outcome["losses"], 1e-4)


@pytest.mark.parametrize("kind", [*KINDS, "ZeRO"])
def test_a_checkpoint_that_is_written_in_the_background_is_of_the_moment_of_the_call(
    checkpoints: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path, kind: str
) -> None:
    outcome = run_processes(save, 2, kind, str(tmp_path / "late"), False)[0]
    assert outcome == checkpoints[kind][1]
    same(losses_after(run_processes(load, 2, kind, str(tmp_path / "late"))), outcome["losses"], 1e-4)


@pytest.mark.parametrize("read", [pytest.param("plain", marks=pytest.mark.long), "regions"])
def test_blocks_that_are_compiled_have_the_names_and_values_of_others(tmp_path: Path, read: str) -> None:
    outcome = run_processes(save, 2, "regions", str(tmp_path / "state"))[0]
    same(losses_after(run_processes(load, 2, read, str(tmp_path / "state"))), outcome["losses"], 1e-4)


MEBIBYTE = 1 << 20
TENSORS, TENSOR = 8, 16 * MEBIBYTE


def large(kind: str) -> tuple[Any, Any, Any]:
    """A model of ``TENSORS`` weights of ``TENSOR`` bytes each, in one unit, with AdamW."""
    import torch

    plugin = {"auto_wrap_policy": "no_wrap", "transformer_cls_names_to_wrap": None, "state_dict_type": kind}
    if kind == "ZeRO":
        plugin |= {"state_dict_type": "SHARDED_STATE_DICT", "zero_stage": 2}
    run = plain_accelerator() if kind == "plain" else accelerator(plugin)
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(TENSORS)))
    return run, *run.prepare(model, torch.optim.AdamW(model.parameters()))


def save_large(kind: str, folder: str) -> None:
    import torch

    run, model, optimizer = large(kind)
    run.backward(model(torch.ones(1, 2048)).sum())
    optimizer.step()
    run.save_state(folder)


def own_memory() -> int:
    """Bytes that this process has in memory and in no file."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def growth_of_memory(action: Callable[[], Any]) -> int:
    """By how many bytes the memory of this process grows at most within ``action``, as far as a thread sees."""
    import threading

    before, peak, has_ended = own_memory(), 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not has_ended.wait(0.001):
            peak = max(peak, own_memory())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        action()
    finally:
        has_ended.set()
        looking.join()
    return max(peak, own_memory()) - before


def load_large(kind: str, folder: str) -> int:
    """By how many bytes the memory of this process grows at most while it loads, as far as a thread sees."""
    run, _, optimizer = large(kind)
    growth = growth_of_memory(lambda: run.load_state(folder))
    own = sum(value.to_local().nbytes for state in optimizer.state.values() for value in state.values() if value.ndim)
    assert own == TENSORS * TENSOR, "half of two moments"
    return growth


@pytest.mark.long
@pytest.mark.skipif(platform.system() != "Linux", reason="other systems do not tell")
@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("SHARDED_STATE_DICT", "SHARDED_STATE_DICT"),
        ("FULL_STATE_DICT", "FULL_STATE_DICT"),
        ("SHARDED_STATE_DICT", "ZeRO"),
        ("ZeRO", "SHARDED_STATE_DICT"),
        ("plain", "SHARDED_STATE_DICT"),
    ],
)
def test_loading_takes_the_memory_of_the_own_shards_and_little_more(tmp_path: Path, written: str, read: str) -> None:
    run_processes(save_large, 2, written, str(tmp_path / "state"))
    # Of two moments, which a new optimizer does not have, and of the model, as all is read before anything is changed.
    shards = 3 * TENSORS * TENSOR // 2
    for grown in run_processes(load_large, 2, read, str(tmp_path / "state")):
        assert grown < shards + 2 * TENSOR + 24 * MEBIBYTE


def size_of_shards(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.distcp"))


@pytest.mark.parametrize(
    ("read", "ranks"),
    [("plain", 1), *(pytest.param(*one, marks=LONG) for one in [("HSDP", 4), ("FULL_STATE_DICT", 3)])],
)
def test_of_copies_of_shards_one_is_written(
    checkpoints: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path, read: str, ranks: int
) -> None:
    outcome = run_processes(save, 4, "HSDP", str(tmp_path / "state"))[0]
    of_one_copy = size_of_shards(checkpoints["SHARDED_STATE_DICT"][0])
    assert size_of_shards(tmp_path / "state") < 1.3 * of_one_copy
    same(losses_after(run_processes(load, ranks, read, str(tmp_path / "state"))), outcome["losses"], 1e-4)


def read_by_the_originals_way(folder: str) -> None:
    """What the original's load_fsdp_model and load_fsdp_optimizer call."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    plain_accelerator()
    model = decoder(seed=3)
    fully_shard(model)
    optimizer = adamw(model.parameters())
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(f"{folder}/SHARDED_STATE_DICT/pytorch_model_fsdp_0"))
    set_model_state_dict(model, state["model"])
    states = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(states, storage_reader=dcp.FileSystemReader(f"{folder}/SHARDED_STATE_DICT/optimizer_0"))
    set_optimizer_state_dict(model, optimizer, states["optimizer"])
    whole = torch.load(f"{folder}/FULL_STATE_DICT/pytorch_model_fsdp.bin", weights_only=True)
    stepped = torch.load(f"{folder}/FULL_STATE_DICT/optimizer.bin", weights_only=True)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.full_tensor(), whole[name], rtol=0, atol=0)
        for entry in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                optimizer.state[weight][entry].full_tensor(), stepped["state"][name][entry], rtol=0, atol=0
            )
    assert optimizer.param_groups[0]["lr"] == stepped["param_groups"][0]["lr"] == 0.005


def test_the_original_reads_our_checkpoints(checkpoints: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    run_processes(read_by_the_originals_way, 2, str(checkpoints["FULL_STATE_DICT"][0].parent))


def write_in_the_originals_way(folder: str) -> list[float]:
    """What its save_fsdp_model and save_fsdp_optimizer call; returns the losses of training on."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    run = run_of("SHARDED_STATE_DICT")
    model, optimizer, schedule = prepared(run, seed=1)
    for number in range(BEFORE):
        step(run, model, optimizer, schedule, number, SHARES)
    weights, states = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer.optimizer)
    dcp.save({"model": weights}, storage_writer=dcp.FileSystemWriter(f"{folder}/pytorch_model_fsdp_0"))
    dcp.save({"optimizer": states}, storage_writer=dcp.FileSystemWriter(f"{folder}/optimizer_0"))
    if run.is_main_process:
        torch.save(schedule.state_dict(), f"{folder}/scheduler.bin")
    run.wait_for_everyone()
    return [step(run, model, optimizer, schedule, BEFORE + number, SHARES) for number in range(AFTER)]


@pytest.mark.parametrize(("kind", "ranks"), [("SHARDED_STATE_DICT", 3), ("plain", 1)])
def test_checkpoints_of_the_original_are_read(tmp_path: Path, kind: str, ranks: int) -> None:
    losses = run_processes(write_in_the_originals_way, 2, str(tmp_path))[0]
    same(losses_after(run_processes(load, ranks, kind, str(tmp_path))), losses, 1e-4)


def load_what_is_damaged(folder: str, message: str) -> None:
    import torch

    from accelerate_cpp.errors import CheckpointError

    run = run_of("SHARDED_STATE_DICT")
    model, _, _ = prepared(run, seed=2)
    before = [weight.to_local().clone() for weight in model.parameters()]
    with pytest.raises((CheckpointError, RuntimeError), match=message):
        run.load_state(folder)
    assert all(torch.equal(old, weight.to_local()) for old, weight in zip(before, model.parameters(), strict=True))


class Harmful:
    """A pickle that would make a folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.mkdir, ("harmed",)


@pytest.mark.parametrize(
    "damage",
    ["cut", "harmful index", *(pytest.param(one, marks=LONG) for one in ["missing", "no index", "other index"])],
)
def test_a_damaged_checkpoint_changes_nothing_on_any_rank(
    checkpoints: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path, damage: str
) -> None:
    import pickle
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(checkpoints["SHARDED_STATE_DICT"][0], folder)
    part, index = folder / "pytorch_model_fsdp_0/__1_0.distcp", folder / "pytorch_model_fsdp_0/.metadata"
    message = "__1_0.distcp"
    if damage == "cut":
        part.write_bytes(part.read_bytes()[:-100])
    elif damage == "missing":
        part.unlink()
    else:
        (folder / "accelerate_cpp.json").unlink()  # as a folder of the original
        message = "the index of a state in shards" if damage != "no index" else "model.safetensors is missing"
        if damage == "no index":
            index.unlink()
        else:
            index.write_bytes(b"\x80\x05." if damage == "other index" else pickle.dumps(Harmful()))
    run_processes(load_what_is_damaged, 2, str(folder), message)
    assert not Path("harmed").exists()


def save_on_one_rank(folder: str) -> None:
    run = run_of("SHARDED_STATE_DICT")
    model = run.prepare(decoder())
    if run.is_main_process:
        with pytest.raises(ValueError, match=r"rank 0 alone, but all ranks have parts .* also on rank 1"):
            run.save_state(folder)
    run.wait_for_everyone()
    assert not Path(folder).exists()
    run.save_state(folder)
    assert model is not None


def test_saving_on_one_rank_alone_is_refused(tmp_path: Path) -> None:
    run_processes(save_on_one_rank, 2, str(tmp_path / "checkpoint"))


def save_without_a_rank_that_has_left(folder: str, in_good_order: bool) -> str:
    from accelerate_cpp.errors import PeerLost

    run = run_of("SHARDED_STATE_DICT")
    run.prepare(decoder())
    if not run.is_main_process:
        if in_good_order:
            return ""
        os._exit(0)
    with pytest.raises(PeerLost) as caught:
        run.save_state(folder)
    assert not Path(folder).exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("in_good_order", "said"), [(False, "rank 1: rank 1 has ended"), (True, "rank 1, but a rank has left the group")]
)
def test_a_rank_that_has_left_before_the_first_save_is_what_is_named(
    tmp_path: Path, in_good_order: bool, said: str
) -> None:
    """The others have parts of what is saved: nobody may be told that it has called the save alone."""
    path = str(tmp_path / "checkpoint")
    saving, _ = start_processes(save_without_a_rank_that_has_left, 2, path, in_good_order)
    assert re.search(rf"save_state .*on rank 0 waited for {said}", saving.value), saving


def save_and_merge(folder: str) -> None:
    import torch
    from safetensors.torch import load_file

    from accelerate_cpp.utils import merge_fsdp_weights

    run = run_of("SHARDED_STATE_DICT")
    model = run.prepare(decoder())
    run.save_state(f"{folder}/state")
    merge_fsdp_weights(f"{folder}/state/pytorch_model_fsdp_0", f"{folder}/merged")
    run.save_model(model, f"{folder}/model")
    run.wait_for_everyone()
    expected = decoder().state_dict()
    for name in ("merged", "model"):
        state = load_file(f"{folder}/{name}/model.safetensors")
        assert state.keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in state.items())


def test_shards_are_merged_and_models_saved_whole(tmp_path: Path) -> None:
    run_processes(save_and_merge, 2, str(tmp_path))


def save_and_load_one_by_one(folder: str, kind: str) -> None:
    """As transformers' Trainer does."""
    import torch

    from accelerate_cpp.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer

    run = run_of(kind)
    plugin = run.state.fsdp_plugin
    model, optimizer, schedule = prepared(run, seed=1)
    for number in range(2):
        step(run, model, optimizer, schedule, number, SHARES)
    save_fsdp_model(plugin, run, model, folder)
    save_fsdp_optimizer(plugin, run, optimizer, model, folder)
    expected = [step(run, model, optimizer, schedule, 2 + number, SHARES) for number in range(3)]
    run = run_of(kind)
    model, optimizer, schedule = prepared(run, seed=2)
    loaded = load_fsdp_model(plugin, run, model, folder)
    assert not loaded.missing_keys + loaded.unexpected_keys
    load_fsdp_optimizer(plugin, run, optimizer, model, folder)
    same([step(run, model, optimizer, schedule, 2 + number, SHARES) for number in range(3)], expected, 1e-6)
    if kind == "SHARDED_STATE_DICT":  # the folder of the model itself may be meant
        load_fsdp_model(plugin, run, model, f"{folder}/pytorch_model_fsdp_0")
    with pytest.raises(ValueError, match="use_dcp=False means files of each process"):
        save_fsdp_model(plugin, run, model, folder, use_dcp=False)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("kind", KINDS)
def test_models_and_optimizers_are_saved_and_loaded_one_by_one(tmp_path: Path, kind: str) -> None:
    run_processes(save_and_load_one_by_one, 2, str(tmp_path / "new"), kind)


def resume_twice(folder: str) -> list[list[int]]:
    from accelerate_cpp.utils import ProjectConfiguration

    found = []
    for _ in range(2):
        project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
        from accelerate_cpp import Accelerator
        from accelerate_cpp.state import AcceleratorState, GradientState
        from accelerate_cpp.utils import FullyShardedDataParallelPlugin

        AcceleratorState._reset_state()
        GradientState._reset_state()
        run = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), project_config=project)
        prepared(run, seed=1)
        resumed = run.resume()
        for _ in range(3):
            run.save_state()
        found.append([int(resumed), run.save_iteration])
    return found


def test_numbered_checkpoints_are_resumed_and_pruned(tmp_path: Path) -> None:
    assert run_processes(resume_twice, 2, str(tmp_path)) == [[[0, 3], [1, 6]]] * 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_4", "checkpoint_5"]
