"""A decoder of Transformers in stages tells what it is, and writes the files of the whole model."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from meshes import accelerator, network
from processes import run_processes
from test_tensor_parallel_libraries import OFFLINE

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

# Torch and transformers are imported inside the functions, which run in processes of their own.


def saved(kind: str, folder: str, schedule: str) -> dict[str, Any]:
    """Trains a model that has values on rank 0, and saves it.

    Returns:
        What was refused, and how the files differ from the model in one process.
    """
    import torch
    import torch.distributed as dist
    import transformers

    from accelerate_cpp.errors import InvalidArgument
    from test_pipeline import decoder, rows_of_text

    run = accelerator({"pp_size": 2}, stages={"schedule": schedule, "micro_batches": 4})
    with nullcontext() if run.is_main_process else torch.device("meta"):
        model = decoder(kind)
    expected = decoder(kind)
    model.config.name_or_path = model.name_or_path = "of/nobody"
    config, generation = model.config, model.generation_config
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(2):
        run.train_batch(rows_of_text(step))
        expected(**rows_of_text(step)).loss.backward()
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    inner = run.unwrap_model(model)
    assert inner.config is config is model.config
    assert inner.generation_config is generation
    assert inner.name_or_path == "of/nobody"
    assert inner.main_input_name == "input_ids"
    for name in ("generate", "device", "loss_function", "no_such_attribute"):
        assert not hasattr(inner, name), name
    refused = []
    state = run.get_state_dict(model)
    for given in (None, {}, {name: value for name, value in state.items() if ".3." not in name}):
        with pytest.raises(InvalidArgument) as refusal:
            inner.save_pretrained(folder, state_dict=given)
        refused.append(str(refusal.value))
    assert not Path(folder).exists()
    dist.barrier()
    names = sorted(state)
    inner.save_pretrained(
        folder, is_main_process=run.is_main_process, state_dict=state, save_function=run.save, max_shard_size="5KB"
    )
    assert sorted(state) == names, "the caller's dictionary is as it was"
    if run.is_main_process and kind != "llama":  # one name of a tensor that has two is enough
        inner.save_pretrained(
            f"{folder}-2", state_dict={name: state[name] for name in names if name != "lm_head.weight"}
        )
    run.wait_for_everyone()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is type(expected)
    is_tied = loaded.get_input_embeddings().weight is loaded.lm_head.weight
    assert is_tied == (kind in ("tied llama", "gpt2"))
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)
    differing = {
        name
        for name, value in expected.config.to_dict().items()
        if name not in ("dtype", "architectures", "_name_or_path") and loaded.config.to_dict()[name] != value
    }
    return {"refused": refused, "differing": differing, "shards": len(list(Path(folder).glob("*.safetensors")))}


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("llama", "1f1b"),
        pytest.param("gpt2", "1f1b", marks=pytest.mark.long),
        pytest.param("tied llama", "interleaved", marks=pytest.mark.long),
    ],
)
def test_the_files_are_those_of_the_whole_model(kind: str, schedule: str, tmp_path: Path) -> None:
    for found in run_processes(saved, 2, kind, str(tmp_path / "model"), schedule, timeout=300, environment=OFFLINE):
        without, empty, _ = found["refused"]
        assert "without state_dict, but this rank only has the stages [" in without
        assert "pass state_dict=accelerator.get_state_dict(model), which all ranks call" in without
        assert "lacks" in empty
        assert "is_main_process=accelerator.is_main_process" in empty
        assert found["differing"] == set()
        assert found["shards"] > 1


def sequence_in_stages(folder: str) -> None:
    from accelerate_cpp.errors import InvalidArgument

    run = accelerator({"pp_size": 2})
    model = run.prepare(network())
    assert not hasattr(model, "config")
    with pytest.raises(InvalidArgument, match=r"of models of Transformers, of which this is none; save accelerator"):
        model.save_pretrained(folder, state_dict=run.get_state_dict(model))


def test_other_models_have_no_such_files(tmp_path: Path) -> None:
    run_processes(sequence_in_stages, 2, str(tmp_path / "model"))


def alone(folder: str) -> None:
    """One process has the whole model."""
    import torch
    import torch.distributed as dist
    import transformers

    from accelerate_cpp import PartialState
    from test_pipeline import decoder, pipeline

    PartialState(cpu=True)
    dist.init_process_group("gloo") if not dist.is_initialized() else None
    model = decoder("llama")
    pipe = pipeline(model)
    assert pipe.config is model.config
    pipe.save_pretrained(folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_one_process_saves_its_model(tmp_path: Path) -> None:
    run_processes(alone, 1, str(tmp_path / "model"), environment=OFFLINE)
