"""Several models, and the models and the Trainer of transformers, train through DeepSpeed as one process does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from processes import run_processes

# Not imported here: that sets variables of this process, with which tests can no longer be forks.
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

# Torch and transformers are imported inside the functions, which run in processes of their own.

STEPS = 5
TOKENS = 32
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
THIRD_PARTY = Path(__file__).parents[1] / "third_party"


def start(**plugins: Any) -> Any:
    """A new Accelerator; ``plugins`` are by name, or one as ``plugin``."""
    from accelerate_cpp import Accelerator
    from accelerate_cpp.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, deepspeed_plugins=plugins.get("plugin", plugins))


def plugin_of(stage: int, **fields: Any) -> Any:
    """One that clips nothing, for micro-batches whose size does not matter."""
    from accelerate_cpp.utils import DeepSpeedPlugin

    made = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=0.0, zero3_save_16bit_model=True, **fields)
    made.deepspeed_config.update(train_micro_batch_size_per_gpu=1, zero_allow_untested_optimizer=True)
    return made


def same(found: Any, expected: Any, rtol: float = 2e-5, atol: float = 1e-6) -> None:
    import torch

    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=rtol, atol=atol)


def same_weights(found: dict[str, Any], expected: Any) -> None:
    import torch

    state = expected.state_dict()
    assert found.keys() == state.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, state[name], rtol=1e-3, atol=2e-5, msg=name)


def network(seed: int, outputs: int = 8) -> Any:
    import torch

    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, outputs))


def adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: Any) -> Any:
    """Whose steps are as large as the gradients: those of AdamW are the same for gradients that are twice as large."""
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int, run: Any = None) -> Any:
    """All samples, or those of this process."""
    import torch

    whole = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    return whole if run is None else whole[run.process_index :: run.num_processes]


# Several models


def judged(judge: Any, model: Any, step: int, run: Any = None) -> Any:
    """The loss of a judge that is to tell samples from what ``model`` makes."""
    return (judge(batch(step, run)) - 1).pow(2).mean() + judge(model(batch(step + 100, run)).detach()).pow(2).mean()


def judging(judge: Any, model: Any, step: int, run: Any = None) -> Any:
    """The loss of the ``model`` that is to deceive it."""
    return (judge(model(batch(step + 100, run))) - 1).pow(2).mean()


def in_turns(models: list[Any], optimizers: list[Any], runs: list[Any]) -> list[list[float]]:
    """Trains a model and its judge; without ``runs`` by torch alone. The losses, and the norms of gradients."""
    import torch

    (model, judge), (of_model, of_judge) = models, optimizers
    run, run_of_judge = runs or (None, None)
    seen = []
    for step in range(STEPS):
        losses, norms = [], []
        for make, own, optimizer, ours in (
            (judged, judge, of_judge, run_of_judge),
            (judging, model, of_model, run),
        ):
            for parameter in judge.parameters():
                parameter.requires_grad_(own is judge)
            loss = make(judge, model, step, ours)
            if ours is None:
                loss.backward()
                norms.append(torch.nn.utils.get_total_norm([one.grad for one in own.parameters()]).item())
                losses.append(loss.item())
            else:
                ours.backward(loss)
                norms.append(ours.clip_grad_norm_(own.parameters(), 0.0).item())
                losses.append(ours.reduce(loss.detach(), "mean").item())
            optimizer.step()
            optimizer.zero_grad()
        seen.append(losses + norms)
    return seen


def in_turns_as_torch(stage: int, accelerators: int) -> None:
    from accelerate_cpp import Accelerator

    models = [network(0), network(1, outputs=1)]
    expected = in_turns(models, [adamw(model) for model in models], [])
    models = [network(0), network(1, outputs=1)]
    if accelerators == 1:
        runs = [start(plugin=plugin_of(stage))] * 2
        *models, first, second = runs[0].prepare(*models, *map(adamw, models))
        optimizers = [first, second]
    else:
        runs = [start(model=plugin_of(stage), judge=plugin_of(stage)), Accelerator()]
        optimizers = []
        for place, (run, name) in enumerate(zip(runs, ("model", "judge"), strict=True)):
            run.state.select_deepspeed_plugin(name)
            models[place], optimizer = run.prepare(models[place], adamw(models[place]))
            optimizers.append(optimizer)
    same(in_turns(models, optimizers, runs), expected)


def together_as_torch(stage: int) -> None:
    expected, models = [], [network(0), network(1)]
    optimizers = [sgd(model) for model in models]
    for step in range(STEPS):
        loss = (models[1](models[0](batch(step))) - batch(step)).pow(2).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        expected.append(loss.item())
    run = start(plugin=plugin_of(stage))
    models = [network(0), network(1)]
    first, second, *_ = run.prepare(*models, *map(sgd, models))
    found = []
    for step in range(STEPS):
        inputs = batch(step, run)
        loss = (second(first(inputs)) - inputs).pow(2).mean()
        run.backward(loss)
        found.append(run.reduce(loss.detach(), "mean").item())
    same(found, expected)


def taught_as_torch(stage: int, through_teacher: bool) -> None:
    """A student learns from a teacher in shards, which only computes; also from how that judges its outputs."""
    import torch

    def loss_of(student: Any, teacher: Any, inputs: Any) -> Any:
        if through_teacher:
            return (teacher(student(inputs)) - inputs).pow(2).mean()
        with torch.no_grad():
            wanted = teacher(inputs)
        return (student(inputs) - wanted).pow(2).mean()

    student, teacher = network(0), network(1).requires_grad_(False)
    optimizer = sgd(student)
    expected = []
    for step in range(STEPS):
        loss = loss_of(student, teacher, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    run = start(student=plugin_of(stage), teacher=plugin_of(3, zero3_init_flag=False))
    student, optimizer = run.prepare(own := network(0), sgd(own))
    run.state.select_deepspeed_plugin("teacher")
    assert run.deepspeed_plugin is run.state.get_deepspeed_plugin("teacher")
    teacher = run.prepare(network(1).requires_grad_(False))
    teacher.eval()
    assert run.prepare(teacher) is teacher
    run.state.select_deepspeed_plugin("student")
    found = []
    for step in range(STEPS):
        loss = loss_of(student, teacher, batch(step, run))
        run.backward(loss)
        assert run.clip_grad_norm_(student.parameters(), 0.0) > 0
        found.append(run.reduce(loss.detach(), "mean").item())
    same(found, expected)


def a_loss_for_another_accelerator_is_refused(stage: int) -> None:
    from accelerate_cpp import Accelerator
    from accelerate_cpp.errors import InvalidArgument

    runs = [start(plugin=plugin_of(stage)), None]
    runs[1] = Accelerator()
    first, _ = runs[0].prepare(one := network(0), sgd(one))
    second, _ = runs[1].prepare(one := network(1), sgd(one))
    loss = second(first(batch(0))).mean()
    with pytest.raises(InvalidArgument, match="the loss also depends on Sequential, which another Accelerator trains"):
        runs[0].backward(loss)


def train_several_models() -> None:
    for stage in (0, 1, 2, 3):
        in_turns_as_torch(stage, accelerators=1)
        in_turns_as_torch(stage, accelerators=2)
        together_as_torch(stage)
        taught_as_torch(stage, through_teacher=False)
        taught_as_torch(stage, through_teacher=True)
        a_loss_for_another_accelerator_is_refused(stage)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_several_models_train_as_in_one_process() -> None:
    run_processes(train_several_models, 2, timeout=240)


# Models of transformers


def language_model(kind: str = "Llama", **options: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32}
    marks = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "attn_implementation": "sdpa"}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **marks, **options)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def rows(length: int = 16) -> list[dict[str, Any]]:
    """Four rows of words for each step."""
    import torch

    generator = torch.Generator().manual_seed(3)
    words = [torch.randint(2, TOKENS, (length,), generator=generator) for _ in range(4 * STEPS)]
    return [{"input_ids": row, "labels": row, "position_ids": torch.arange(length)} for row in words]


def rows_of(step: int, run: Any = None, size: int = 4) -> dict[str, Any]:
    import torch

    chosen = rows()[size * step : size * step + size]
    own = chosen if run is None else chosen[run.process_index :: run.num_processes]
    return {name: torch.stack([row[name] for row in own]) for name in ("input_ids", "labels")}


def alone(model: Any, size: int = 4) -> list[float]:
    """The losses of ``model``, which torch trains on batches of all rows."""
    optimizer, losses = sgd(model), []
    for step in range(4 * STEPS // size):
        loss = model(**rows_of(step, size=size)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(run: Any, model: Any) -> tuple[Any, list[float]]:
    model, optimizer = run.prepare(model, sgd(model))
    losses = []
    for step in range(STEPS):
        loss = model(**rows_of(step, run)).loss
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(run.reduce(loss.detach(), "mean").item())
    return model, losses


def is_sharded(model: Any) -> bool:
    (answer,) = {hasattr(parameter, "ds_id") for parameter in model.parameters()}
    return answer


def build_and_save(folder: str) -> None:
    """Models are built in shards, train, and are written whole; tied weights are written once."""
    from accelerate_cpp.alias.finder import install

    install()
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from accelerate_cpp.errors import InvalidArgument
    from accelerate_cpp.utils import DeepSpeedPlugin, GatheredParameters

    expected_model = language_model(tie_word_embeddings=True)
    expected = alone(expected_model)
    run = start(plugin=plugin_of(3))
    plugin, main = run.deepspeed_plugin, run.is_main_process
    with plugin.zero3_init_context_manager(enable=False):
        whole = language_model(tie_word_embeddings=True)
        assert not is_sharded(whole)
        whole.save_pretrained(f"{folder}/begin", is_main_process=main)
        run.wait_for_everyone()
        assert not is_sharded(AutoModelForCausalLM.from_pretrained(f"{folder}/begin"))
    made = AutoModelForCausalLM.from_config(expected_model.config)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/begin")
    assert is_sharded(made)
    assert is_sharded(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    held = list(model.parameters())
    assert {parameter.numel() for parameter in held} == {0}
    with GatheredParameters(held):
        for parameter, other in zip(held, whole.parameters(), strict=True):
            torch.testing.assert_close(parameter, other)
    assert {parameter.numel() for parameter in held} == {0}
    model, losses = trained(run, model)
    same(losses, expected)

    own = run.unwrap_model(model)
    state = run.get_state_dict(model)
    if main:
        same_weights(state, expected_model)
        assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    else:
        assert state == {}
    own.save_pretrained(f"{folder}/end", is_main_process=main, save_function=run.save, state_dict=state)
    run.save_model(model, f"{folder}/own")
    run.save_state(f"{folder}/state")
    if main:
        with plugin.zero3_init_context_manager(enable=False):
            same_weights(AutoModelForCausalLM.from_pretrained(f"{folder}/end").state_dict(), expected_model)
        (name,) = expected_model.state_dict().keys() - load_file(f"{folder}/own/model.safetensors").keys()
        assert name in ("lm_head.weight", "model.embed_tokens.weight")
        script = [sys.executable, f"{folder}/state/zero_to_fp32.py", f"{folder}/state", f"{folder}/fp32"]
        subprocess.run(script, check=True, capture_output=True)
        same_weights(torch.load(f"{folder}/fp32/pytorch_model.bin"), expected_model)
    run.wait_for_everyone()

    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}
    told = HfDeepSpeedConfig({"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1})
    model = AutoModelForCausalLM.from_config(expected_model.config)
    assert is_sharded(model)
    run = start(plugin=DeepSpeedPlugin(hf_ds_config=told.config))
    model, _ = run.prepare(model, sgd(model))
    with pytest.raises(InvalidArgument, match="stage3_gather_16bit_weights_on_model_save=False in zero_optimization"):
        run.get_state_dict(model)


@pytest.mark.long
def test_models_are_built_in_shards_and_written_whole(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_processes(build_and_save, 2, str(tmp_path), timeout=240, environment=OFFLINE)


def split_layers(stage: int, folder: str) -> None:
    """All processes of a group have the same batches, and each a part of each layer."""
    import torch
    from torch.utils.data import DataLoader

    from accelerate_cpp.utils import DeepSpeedPlugin

    expected_model = language_model()
    expected = alone(expected_model, 2)
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.0, "tensor_parallel": {"autotp_size": 2}}
    sizes = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    plugin = DeepSpeedPlugin(hf_ds_config={**config, **sizes, "zero_allow_untested_optimizer": True})
    run = start(plugin=plugin)
    model = language_model()
    model, optimizer, loader = run.prepare(model, sgd(model), DataLoader(rows(), batch_size=2))
    assert model.module.model.layers[0].self_attn.q_proj.weight.shape == (16, 32)
    losses = []
    for batch_of_group in loader:
        loss = model(**batch_of_group).loss
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    same(losses, expected)
    state = run.get_state_dict(model)
    run.save_model(model, f"{folder}/{stage}")
    if run.is_main_process:
        own = {name: value for name, value in expected_model.state_dict().items() if name in state}
        assert len(own) == len(list(expected_model.parameters()))
        for name, value in own.items():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=2e-5, msg=name)
    else:
        assert state == {}


def expert_layers(from_environment: bool) -> None:
    """Stage 3 gathers the experts of a layer at once, as each process may need others."""
    from deepspeed.utils import get_z3_leaf_modules

    expected = alone(language_model("Mixtral", num_local_experts=4))
    name = "MixtralSparseMoeBlock"
    os.environ.pop("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", None)
    fields = {} if from_environment else {"transformer_moe_cls_names": name}
    if from_environment:
        os.environ["ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"] = name
    run = start(plugin=plugin_of(3, **fields))
    model, losses = trained(run, language_model("Mixtral", num_local_experts=4))
    assert [type(one).__name__ for one in get_z3_leaf_modules(model)] == [name] * 2
    same(losses, expected)
    os.environ.pop("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", None)


def loss_of_group(model: Any, parts: dict[str, Any], group: Any) -> Any:
    """The mean over the sequences of which each process has a part, as the original's documentation computes it."""
    import torch
    from torch.distributed.nn.functional import all_gather

    labels = parts.pop("shift_labels")
    own = model.module
    logits = model(**parts).logits
    loss = own.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=own.config.vocab_size)
    counts = all_gather((labels != -100).sum(), group=group)
    weighted = [one * count for one, count in zip(all_gather(loss, group=group), counts, strict=True)]
    return torch.stack(weighted).sum() / sum(counts)


def split_sequences(stage: int, is_variable: bool, reduces_parts: bool, expected: list[float]) -> None:
    from deepspeed.utils import groups
    from torch.utils.data import DataLoader

    from accelerate_cpp import Accelerator
    from accelerate_cpp.state import AcceleratorState, GradientState
    from accelerate_cpp.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    AcceleratorState._reset_state()
    GradientState._reset_state()
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=16, sp_seq_length_is_variable=is_variable, sp_attn_implementation="sdpa"
    )
    parallelism = ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler)
    plugin = plugin_of(stage, zero3_init_flag=False)
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = "auto"
    plugin.deepspeed_config["zero_optimization"]["reduce_scatter"] = reduces_parts
    run = Accelerator(cpu=True, deepspeed_plugin=plugin, parallelism_config=parallelism)
    model = language_model()
    model, optimizer, loader = run.prepare(model, sgd(model), DataLoader(rows(), batch_size=2))
    assert run.deepspeed_config["train_batch_size"] == 2
    losses = []
    for parts in loader:
        assert parts["input_ids"].shape == (2, 8)
        loss = loss_of_group(model, dict(parts), groups._get_sequence_parallel_group())
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    same(losses, expected)


def split_models(folder: str) -> None:
    from accelerate_cpp.alias.finder import install

    install()
    for from_environment in (False, True):
        expert_layers(from_environment)
    for stage in (0, 1, 2):
        split_layers(stage, folder)
    expected = alone(language_model(), size=2)
    for stage in (0, 1, 2, 3):
        for is_variable in (True, False):
            # From then on, all models have the attention for split sequences.
            split_sequences(stage, is_variable, stage != 3 or is_variable, expected)


@pytest.mark.long
def test_experts_layers_and_sequences_are_split(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_processes(split_models, 2, str(tmp_path), timeout=240, environment=OFFLINE)


# The Trainer

AUTO = "auto"
SIZES = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), AUTO)
BUCKETS = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), AUTO
)
OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)}


def configuration(stage: int, with_optimizer: bool) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True, **BUCKETS}
    own = {"optimizer": {**OPTIMIZER, "params": {**OPTIMIZER["params"], "torch_adam": True}}} if with_optimizer else {}
    switches = {name: {"enabled": AUTO} for name in ("fp16", "bf16")}
    return {"gradient_clipping": AUTO, "zero_optimization": zero, **SIZES, **switches, **own}


def run_trainer(folder: str, config: dict[str, Any] | None, resumed: bool) -> dict[str, Any]:
    """What the Trainer of transformers reports, with half of the steps before a checkpoint."""
    from accelerate_cpp.alias.finder import install

    install()
    sys.path.insert(0, str(THIRD_PARTY))
    import torch
    from tiny_language_model import Rows, model
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    processes = int(os.environ["WORLD_SIZE"])
    arguments = TrainingArguments(
        folder,
        max_steps=6,
        per_device_train_batch_size=8 // processes,
        per_device_eval_batch_size=4 // processes,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        weight_decay=0.0,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        deepspeed=config,
    )
    trainer = InOrder(model(), arguments, train_dataset=Rows(96), eval_dataset=Rows(12))
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resumed else None)
    history = trainer.state.log_history
    trainer.save_model(f"{folder}/saved")
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [float(entry["grad_norm"]) for entry in history if "loss" in entry],
        "evaluated": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "engine": type(trainer.model_wrapped).__name__,
    }


def in_processes(count: int, folder: Path, config: dict[str, Any] | None, resumed: bool = False) -> dict[str, Any]:
    found: Callable[..., Any] = run_trainer
    reports: list[dict[str, Any]] = run_processes(
        found, count, str(folder), config, resumed, timeout=240, environment=OFFLINE
    )
    return reports[0]


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("alone")
    return in_processes(1, folder, None), folder


@pytest.mark.long
@pytest.mark.parametrize(("stage", "with_optimizer"), [(2, False), (3, True)])
def test_the_trainer_of_transformers_trains_and_resumes_as_in_one_process(
    tmp_path: Path, trained_alone: tuple[dict[str, Any], Path], stage: int, with_optimizer: bool
) -> None:
    from safetensors.torch import load_file

    expected, folder = trained_alone
    config = configuration(stage, with_optimizer)
    found = in_processes(2, tmp_path, config)
    assert (found.pop("engine"), expected["engine"]) == ("DeepSpeedEngine", "GPT2LMHeadModel")
    for name, values in found.items():
        same(values, expected[name], rtol=1e-5)
    resumed = in_processes(2, tmp_path, config, resumed=True)
    assert {name: resumed[name] for name in found} == found
    saved, other = (load_file(f"{one}/saved/model.safetensors") for one in (tmp_path, folder))
    assert saved.keys() == other.keys()
    for name, value in saved.items():
        same(value.tolist(), other[name].tolist(), rtol=1e-3, atol=1e-4)  # biases of keys only follow rounding
