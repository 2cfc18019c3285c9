"""A model whose stages run in two and in three real processes gives what it gives in one."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

ROWS = (1, 2, 6, 7, 13)


def network() -> Any:
    """A model whose last stage reads the input, a value that lies expanded in memory, and a shared weight."""
    import torch
    from torch import nn

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
            self.layers[4].weight = self.layers[0].weight
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Any, scale: float = 1.0, mask: Any = None) -> Any:
            bias = x[:, :1].expand(-1, 8)
            with torch.no_grad():
                start = x * scale
            y = x
            for layer in self.layers:
                y = self.dropout(layer(y)).relu() + bias
            return {"y": y if mask is None else y * mask, "sum": (start + y).sum(-1)}

    torch.manual_seed(0)
    return Network().eval()


def state_over(backend: str | None) -> Any:
    from accelerate_cpp import PartialState

    return PartialState(cpu=True, **({} if backend is None else {"backend": backend}))


def difference(found: Any, expected: Any) -> float:
    assert [value.shape for value in found] == [value.shape for value in expected]
    return max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True))


def batches(backend: str | None, gather_output: bool) -> dict[str, Any]:
    """How far outputs are from those of the whole model; ``None`` where there is no output."""
    import torch

    from accelerate_cpp import prepare_pippy

    state, model, whole = state_over(backend), network(), network()
    forward = type(model).forward
    prepared = prepare_pippy(model, example_args=(torch.rand(2, 8),), num_chunks=3, gather_output=gather_output)
    found: dict[str, Any] = {"same": prepared is model, "points": model.hf_split_points, "backend": state.backend}
    found["modules as before"] = (
        all("forward" not in vars(module) for module in model.layers) and model._original_forward.__func__ is forward
    )
    for rows in ROWS:
        batch = torch.rand(rows, 8)
        output = model(batch if state.is_main_process else torch.empty(0))
        found[f"{rows} rows"] = None if output is None else difference(output, whole(batch).values())
        found["gradients"] = output is not None and output[0].requires_grad
    return found


@pytest.mark.parametrize(("backend", "processes"), [(None, 2), ("gloo", 2), (None, 3)])
def test_batches_of_any_size_go_through_the_stages(backend: str | None, processes: int) -> None:
    ranks = run_processes(batches, processes, backend, False)
    for rank, found in enumerate(ranks):
        assert found["same"]
        assert found["modules as before"]
        assert found["backend"] == backend or backend is None
        assert found["points"] == {2: ["layers.3"], 3: ["layers.2", "layers.4"]}[processes]
        assert not found["gradients"]
        for rows in ROWS:
            error = found[f"{rows} rows"]
            assert error is None if rank < processes - 1 else error < 1e-6


def test_the_output_is_given_to_all_processes_if_that_is_asked_for() -> None:
    for found in run_processes(batches, 2, None, True):
        assert all(found[f"{rows} rows"] < 1e-6 for rows in ROWS)


def named() -> list[Any]:
    """Named inputs, a number among them; then another example; stages that are chosen by hand."""
    import torch

    from accelerate_cpp import prepare_pippy

    state, model, whole = state_over(None), network(), network()
    errors = []
    for mask_rows, points in ((1, "auto"), (2, ["layers.1"])):
        inputs = {"scale": 0.5, "mask": torch.rand(4, 8), "x": torch.rand(4, 8)}
        example = {name: value[:mask_rows] if name != "scale" else value for name, value in inputs.items()}
        prepare_pippy(model, points, example_kwargs=example)
        output = model(**inputs)
        errors.append(None if output is None else difference(output, whole(**inputs).values()))
    return [state.is_last_process, model.hf_split_points, errors]


def test_named_inputs_and_a_second_example_are_taken() -> None:
    first, last = run_processes(named, 2)
    assert first == [False, ["layers.1"], [None, None]]
    assert last[:2] == [True, ["layers.1"]]
    assert max(last[2]) < 1e-6


def refusals() -> list[str]:
    import torch

    from accelerate_cpp import prepare_pippy
    from accelerate_cpp.errors import InvalidArgument

    state_over(None)
    example = (torch.rand(2, 8),)

    def refused(call: Any) -> str:
        with pytest.raises(InvalidArgument) as refusal:
            call()
        return str(refusal.value)

    said = [
        refused(lambda: prepare_pippy(network())),
        refused(lambda: prepare_pippy(network(), ["layers.9"], example_args=example)),
        refused(lambda: prepare_pippy(network(), ["layers"], example_args=example)),
        refused(lambda: prepare_pippy(network(), example_args=(torch.rand(2, 9),))),
    ]
    model = prepare_pippy(network(), example_args=example)
    said += [refused(partial(model, *inputs)) for inputs in ((torch.rand(2, 9),), (torch.rand(2, 8), 2), ())]
    assert (model(*example) is None) == (torch.distributed.get_rank() == 0), "the pipeline goes on"
    model = prepare_pippy(sequence(), example_args=example)
    said += [refused(partial(model, *inputs)) for inputs in ((1,), (), (torch.rand(0, 8),))]
    assert (model(*example) is None) == (torch.distributed.get_rank() == 0), "the pipeline goes on"
    return said


def test_what_cannot_be_done_is_refused_on_all_processes() -> None:
    patterns = [
        "have no tensor with rows",
        "split_points has 'layers.9', but Network has no such module",
        "splitting Network at layers gave 1 stages; expected 2: name modules that each forward pass calls exactly once",
        r"torch.export cannot trace Network in stages that begin with layers.3 \(.*\); switch off caches",
        r"for inputs \(float32\[..., 8\]\), and rank 0 passed \(float32\[..., 9\]\) .*prepare_pippy again",
        r"rank 0 passed \(float32\[..., 8\], 2\)",
        r"rank 0 passed \(\)",
        "takes a tensor or a tuple of tensors, but got int",
        "pipeline of Sequential: missing a required argument: 'input'",
        "expected tensors with equally many rows, at least one",
    ]
    for said in run_processes(refusals, 2):
        for pattern, sentence in zip(patterns, said, strict=True):
            assert re.search(pattern, sentence), sentence


def sequence() -> Any:
    """Entries of unequal costs, one of which is a sequence itself."""
    import torch
    from torch import nn

    class Group(nn.Sequential):
        pass

    torch.manual_seed(0)
    inner = Group(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.5))
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), inner, nn.LayerNorm(8), nn.Linear(8, 3)).eval()


def how(model: Any) -> str:
    return type(model.pippy_stage).__name__


def shared_stages() -> dict[str, Any]:
    """For models that are trained in stages: with which they ran, and how far outputs are from the whole model's.

    Outputs of every other model are given to all processes.
    """
    import torch
    from torch import nn

    from accelerate_cpp import prepare_pippy
    from test_pipeline import decoder

    class Dictionary(nn.Module):
        def forward(self, x: Any) -> Any:
            return {"x": x, "more": x + 1}

    class Sum(nn.Module):
        def forward(self, found: Any) -> Any:
            return found["x"] + found["more"]

    state, found = state_over(None), {}

    def compare(name: str, model: Any, example: Any, batches: list[Any], **options: Any) -> None:
        gather_output = len(found) % 2 == 1
        expected = [whole(model(*args, **named)) for args, named in batches]
        prepare_pippy(model, example_args=example[0], example_kwargs=example[1], gather_output=gather_output, **options)
        errors = []
        for (args, named), wanted in zip(batches, expected, strict=True):
            own = model(*args, **named) if state.is_main_process else model()
            errors.append(None if own is None else difference([own], [wanted]))
        found[name] = how(model), model.hf_split_points, gather_output, errors

    def whole(output: Any) -> Any:
        return output.logits.detach() if hasattr(output, "logits") else output.detach()

    torch.manual_seed(0)
    one = (torch.rand(2, 8),), {}
    rows = [((torch.rand(count, 8),), {}) for count in ROWS]
    compare("sequence", sequence(), one, [*rows, ((), {"input": torch.rand(3, 8)})])
    compare("inner names", sequence(), one, rows, split_points=["2.2"])
    compare("outer names", sequence(), one, rows, split_points="2")
    compare("classes", sequence(), one, rows, no_split_module_classes=["Group"])
    compare("longer", nn.Sequential(nn.Linear(8, 8), nn.Tanh()).eval(), one, [((torch.rand(5, 4, 8),), {})])
    pairs = nn.Sequential(nn.Linear(8, 8), Dictionary(), Sum(), nn.Linear(8, 8)).eval()
    compare("structures", pairs, one, rows, split_points=["2"])
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    compare("taken apart", nn.Sequential(nn.Identity(), block), ((torch.rand(2, 3, 8),), {}), [])
    for kind in ("llama", "gpt2"):
        model = decoder(kind).eval()
        words = [torch.randint(3, 23, shape) for shape in ((5, 7), (1, 4), (4, 9))]
        masks = [torch.ones_like(one).tril(1) for one in words]
        named = [((), {"input_ids": one, "attention_mask": mask}) for one, mask in zip(words, masks, strict=True)]
        placed = [((words[0],), {"attention_mask": masks[0], "use_cache": False}), ((words[1],), {})]
        compare(kind, model, ((words[0][:2],), {}), [*named, *placed])
    more = decoder("llama", use_cache=False, output_hidden_states=True).eval()
    compare("hidden states", more, ((words[0],), {}), [])
    points = model.hf_split_points
    prepare_pippy(model, example_args=(words[0][:2],))
    assert (how(model), model.hf_split_points) == ("DecoderStage", points), "as before, for another example"
    compare("head", decoder("llama").eval(), ((words[0][:2],), {}), placed, split_points=["lm_head"])
    compare(
        "within a layer",
        decoder("llama", use_cache=False).eval(),
        ((words[0],), {}),
        [((words[0],), {})],
        split_points=["model.layers.2.mlp"],
    )
    return found


def test_stages_are_those_of_training_where_these_can_cut_the_model() -> None:
    pytest.importorskip("transformers")
    expected = {
        "sequence": ("SequentialStage", ["2.1"]),
        "inner names": ("SequentialStage", ["2.2"]),
        "outer names": ("SequentialStage", ["2"]),
        "classes": ("SequentialStage", ["2.0"]),
        "longer": ("SequentialStage", ["1"]),
        "structures": ("TracedStage", ["2"]),
        "taken apart": ("TracedStage", ["1.linear1"]),
        "llama": ("DecoderStage", ["model.layers.4"]),
        "gpt2": ("DecoderStage", ["transformer.h.3"]),
        "hidden states": ("TracedStage", ["model.layers.4"]),
        "head": ("DecoderStage", ["lm_head"]),
        "within a layer": ("TracedStage", ["model.layers.2.mlp"]),
    }
    first, last = run_processes(shared_stages, 2, timeout=300)
    for found in (first, last):
        assert {name: (kind, points) for name, (kind, points, *_) in found.items()} == expected
    for name, (*_, gathers, errors) in last.items():
        for elsewhere, error in zip(first[name][-1], errors, strict=True):
            assert error < 1e-6, name
            assert elsewhere < 1e-6 if gathers else elsewhere is None, name
