"""Models of transformers whose layers are split train as one process does, also by its Trainer."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from processes import run_processes

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]

# Torch and transformers are imported inside the functions, which run in processes of their own.

STEPS, VOCABULARY, TOKENS = 6, 64, 12
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def decoder(kind: str, **options: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {**SIZES, **options}
    if kind == "Qwen3":
        sizes["head_dim"] = 8
    config = getattr(transformers, f"{kind}Config")(**sizes, bos_token_id=1, eos_token_id=2)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def batch(step: int) -> dict[str, Any]:
    import torch

    tokens = torch.randint(0, VOCABULARY, (8, TOKENS), generator=torch.Generator().manual_seed(step))
    labels = tokens.clone()
    labels[:, :2] = -100
    return {"input_ids": tokens, "labels": labels}


def losses_and_norms(run: Any, model: Any, optimizer: Any, expected: Any) -> tuple[list[Any], list[Any]]:
    """Those of steps of a prepared ``model``, and of ``expected`` in this process alone."""
    import torch

    plain = torch.optim.SGD(expected.parameters(), lr=0.2)
    mesh = run._session.topology.mesh
    found, wanted = [], []
    for step in range(STEPS):
        whole = batch(step)
        own = {name: rows.tensor_split(mesh.data_size)[mesh.data_rank] for name, rows in whole.items()}
        loss = model(**own).loss
        run.backward(loss)
        found.append((run.reduce(loss.detach(), "mean").item(), run.clip_grad_norm_(model.parameters(), 1.0).item()))
        loss = expected(**whole).loss
        loss.backward()
        wanted.append((loss.item(), torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0).item()))
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    return found, wanted


def trained(kind: str, sizes: dict[str, int], options: dict[str, Any], cuts: bool) -> dict[str, Any]:
    """Losses and norms of several processes and of one, and how far their weights are apart."""
    import torch

    from accelerate_cpp import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate_cpp.utils import TorchTensorParallelConfig

    layers = TorchTensorParallelConfig(sequence_parallel=cuts)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if "dp_shard_size" in sizes else None
    config = ParallelismConfig(**sizes, tp_handler=layers)  # type: ignore[arg-type]
    run = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)
    model, expected = decoder(kind, **options), decoder(kind, **options)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    found, wanted = losses_and_norms(run, model, optimizer, expected)
    state = run.get_state_dict(model)
    apart = {name: float((state[name] - value).abs().max()) for name, value in expected.state_dict().items() if state}
    return {"found": found, "wanted": wanted, "apart": max(apart.values(), default=0.0), "names": len(state)}


@pytest.mark.parametrize(
    ("kind", "sizes", "options", "cuts"),
    [
        ("Llama", {"tp_size": 2}, {}, False),
        ("Llama", {"tp_size": 2}, {}, True),
        ("Qwen3", {"tp_size": 2}, {}, False),
        ("Qwen3", {"dp_shard_size": 2, "tp_size": 2}, {}, True),
        ("Llama", {"dp_replicate_size": 2, "tp_size": 2}, {"tie_word_embeddings": True}, False),
    ],
)
def test_decoders_are_split_by_their_own_plans(
    kind: str, sizes: dict[str, int], options: dict[str, Any], cuts: bool
) -> None:
    processes = 2 if sizes.keys() == {"tp_size"} else 4
    for ended in run_processes(trained, processes, kind, sizes, options, cuts, timeout=300, environment=OFFLINE):
        for found, wanted in zip(ended["found"], ended["wanted"], strict=True):
            assert found == pytest.approx(wanted, rel=1e-5)
        assert ended["apart"] < 1e-5


def training_arguments(folder: str, **options: Any) -> Any:
    """Those of the Trainer for six steps whose losses and norms it reports."""
    from transformers import TrainingArguments

    return TrainingArguments(
        f"{folder}/out{os.environ['WORLD_SIZE']}",
        per_device_train_batch_size=4,
        max_steps=6,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )


def run_trainer(folder: str) -> list[tuple[float, float]]:
    """Losses and norms that the Trainer reports; with two processes, transformers splits the model as it loads it."""
    from accelerate_cpp.alias.finder import install

    install()
    import torch
    from transformers import LlamaForCausalLM, Trainer

    processes = int(os.environ["WORLD_SIZE"])
    arguments = training_arguments(folder, gradient_accumulation_steps=2)
    options = {"tp_plan": "auto", "tp_size": processes} if processes > 1 else {}
    if processes == 1:
        decoder("Llama").save_pretrained(f"{folder}/model")
    model = LlamaForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32, **options)
    rows = [{"input_ids": row, "labels": row} for step in range(6) for row in batch(step)["input_ids"]]
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    return [(one["loss"], float(one["grad_norm"])) for one in trainer.state.log_history if "grad_norm" in one]


def test_the_trainer_trains_a_model_that_transformers_has_split(tmp_path: Path) -> None:
    (alone,) = run_processes(run_trainer, 1, str(tmp_path), timeout=300, environment=OFFLINE)
    assert len(alone) == 6
    for own in run_processes(run_trainer, 2, str(tmp_path), timeout=300, environment=OFFLINE):
        assert own == [pytest.approx(step, rel=1e-4) for step in alone]


_OF_TRANSFORMERS = {"dp_shard_size": "fsdp_size", "dp_replicate_size": "dp_replicate_size"}


def trained_as_loaded(folder: str, sizes: dict[str, int]) -> tuple[list[Any], list[Any]]:
    """Losses and norms of a model that transformers has split over the ``tp`` of a mesh, and those of one process."""
    import torch
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    from accelerate_cpp import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate_cpp.errors import InvalidArgument

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if "dp_shard_size" in sizes else None
    run = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes), fsdp_plugin=plugin)  # type: ignore[arg-type]
    expected = decoder("Llama")
    if run.is_main_process:
        expected.save_pretrained(f"{folder}/model")
    run.wait_for_everyone()
    with pytest.raises(InvalidArgument, match="is split over 4 processes, but tp_size is 2 of 4"):
        run.prepare(LlamaForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32, tp_plan="auto", tp_size=4))
    asked = DistributedConfig(
        tp_plan="auto", tp_size=2, **{_OF_TRANSFORMERS[name]: 2 for name in sizes if "dp" in name}
    )
    model = LlamaForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32, distributed_config=asked)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    return losses_and_norms(run, model, optimizer, expected)


@pytest.mark.parametrize("others", ["dp_shard_size", "dp_replicate_size"])
def test_models_that_transformers_has_split_are_shared_out_too(others: str, tmp_path: Path) -> None:
    sizes = {others: 2, "tp_size": 2}
    for found, wanted in run_processes(trained_as_loaded, 4, str(tmp_path), sizes, timeout=300, environment=OFFLINE):
        for one, other in zip(found, wanted, strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def run_trainer_with_split_sequences(folder: str) -> list[tuple[float, float]]:
    """Losses and norms that the Trainer reports; two processes have parts of each sequence."""
    from accelerate_cpp.alias.finder import install

    install()
    from accelerate import ParallelismConfig
    from transformers import Trainer

    mesh = {"parallelism_config": ParallelismConfig(cp_size=2)} if int(os.environ["WORLD_SIZE"]) > 1 else {}
    arguments = training_arguments(folder, **mesh)
    rows = [{"input_ids": row, "labels": row} for step in range(6) for row in batch(step)["input_ids"]]
    trainer = Trainer(decoder("Llama"), arguments, train_dataset=rows)
    trainer.train()
    return [(one["loss"], float(one["grad_norm"])) for one in trainer.state.log_history if "grad_norm" in one]


def test_the_trainer_splits_sequences(tmp_path: Path) -> None:
    (alone,) = run_processes(run_trainer_with_split_sequences, 1, str(tmp_path), timeout=300, environment=OFFLINE)
    assert len(alone) == 6
    for own in run_processes(run_trainer_with_split_sequences, 2, str(tmp_path), timeout=300, environment=OFFLINE):
        assert own == [pytest.approx(step, rel=1e-4) for step in alone]
