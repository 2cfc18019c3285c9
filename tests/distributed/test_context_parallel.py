"""Attention over sequences that are split over processes is torch's attention over whole ones, and so is training.

What is expected comes from torch's own attention on whole sequences in one process.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from processes import run_processes
from scenarios import failures_of

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

STRATEGIES = ("allgather", "alltoall", "ulysses")
STEPS, ROWS, VOCABULARY, PLACES, WIDTH, HEADS = 10, 2, 17, 16, 48, 12


def context(strategy: str) -> Any:
    import torch.distributed as dist

    from accelerate_cpp.parallel.context.context import ContextParallel

    return ContextParallel(dist.group.WORLD, strategy)


def all_refused(calls: list[tuple[str, Callable[[], Any]]]) -> None:
    """Each call raises InvalidArgument with a message that contains the words."""
    from accelerate_cpp.errors import InvalidArgument

    for words, call in calls:
        with pytest.raises(InvalidArgument, match=re.escape(words)):
            call()


# Attention alone.


def attends_like_torch(
    strategy: str,
    causal: bool,
    dtype_name: str,
    heads: int,
    kv_heads: int,
    tokens_of_chunk: int = 3,
    value_dim: int = 8,
    scale: float | None = None,
    transposed: bool = False,
) -> None:
    import torch
    from torch.nn import functional

    context_parallel = context(strategy)
    dtype = getattr(torch, dtype_name)
    tokens = 2 * context_parallel.sequences.size * tokens_of_chunk
    generator = torch.Generator().manual_seed(1)

    def drawn(number: int, dim: int) -> Any:
        return torch.randn(2, number, tokens, dim, generator=generator).to(dtype)

    whole = [drawn(heads, 8), drawn(kv_heads, 8), drawn(kv_heads, value_dim)]
    of_output = drawn(heads, value_dim)
    options = {"is_causal": causal, "scale": scale, "enable_gqa": heads != kv_heads}

    def share(tensor: Any) -> Any:
        part = context_parallel.sequences.share(tensor, 2)
        return part.transpose(1, 2).contiguous().transpose(1, 2) if transposed else part

    def of_one_process(computed_in: Any) -> list[Any]:
        """This process's part of the output and of the gradients."""
        leaves = [tensor.to(computed_in, copy=True).requires_grad_() for tensor in whole]
        output = functional.scaled_dot_product_attention(*leaves, **options)
        output.backward(of_output.to(computed_in))
        return [share(tensor) for tensor in (output.detach(), *(leaf.grad for leaf in leaves))]

    parts = [share(tensor).requires_grad_() for tensor in whole]
    with context_parallel.split():
        output = functional.scaled_dot_product_attention(*parts, **options)
    output.backward(share(of_output))
    found = [output.detach(), *(part.grad for part in parts)]
    expected, exact = of_one_process(dtype), of_one_process(torch.float64)
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    for name, ours, torchs, true in zip(names, found, expected, exact, strict=True):
        assert ours.dtype == dtype
        if dtype.itemsize > 2:
            tolerance = 1e-10 if dtype == torch.float64 else 1e-5
            torch.testing.assert_close(
                ours, torchs, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
        else:  # both are rounded, more than once
            assert (ours - true).norm() <= 2 * (torchs - true).norm(), name


def few_attentions() -> dict[str, Callable[[], None]]:
    fused = itertools.product(STRATEGIES, (True, False), (("float32", 6, 6), ("bfloat16", 12, 2)))
    cases = {
        f"{strategy} {causal=} {dtype} {heads=} {kv_heads=}": partial(
            attends_like_torch, strategy, causal, dtype, heads, kv_heads
        )
        for strategy, causal, (dtype, heads, kv_heads) in fused
    }
    for causal in (True, False):
        attends = partial(attends_like_torch, "alltoall", causal, "float32", 6, 2, value_dim=5)
        cases[f"{causal=}, another head_dim of values"] = attends
    return cases


def many_attentions() -> dict[str, Callable[[], None]]:
    """All strategies with 12 heads, which 2, 3 and 4 processes divide."""
    plain = itertools.product(
        STRATEGIES, (True, False), ("float64", "float32", "bfloat16", "float16"), (12,), (1, 3, 12)
    )
    cases = {f"{case}": partial(attends_like_torch, *case) for case in plain}
    for strategy, causal in itertools.product(STRATEGIES, (True, False)):
        attends = partial(attends_like_torch, strategy, causal)
        cases |= {
            f"{strategy} {causal=}, a token per chunk": partial(attends, "float32", 12, 12, tokens_of_chunk=1),
            f"{strategy} {causal=}, many tokens": partial(attends, "float32", 12, 4, tokens_of_chunk=100),
            f"{strategy} {causal=}, scaled": partial(attends, "float32", 12, 4, scale=0.7),
            f"{strategy} {causal=}, transposed": partial(attends, "float32", 12, 4, transposed=True),
            f"{strategy} {causal=}, another head_dim of values": partial(attends, "float32", 12, 4, value_dim=5),
            f"{strategy} {causal=}, that in bfloat16": partial(attends, "bfloat16", 12, 12, value_dim=5),
        }
        if strategy != "ulysses":
            in_strips = partial(attends, "float32", 4, 1, tokens_of_chunk=260, value_dim=5)
            cases[f"{strategy} {causal=}, in several strips"] = in_strips
    return cases


def casts_under_autocast(strategy: str) -> None:
    import torch
    from torch.nn import functional

    context_parallel = context(strategy)
    whole = torch.randn(1, 12, 24, 8, generator=torch.Generator().manual_seed(1))
    reference = whole.clone().requires_grad_()
    part = context_parallel.sequences.share(whole, 2).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = functional.scaled_dot_product_attention(reference, reference, reference)
        with context_parallel.split():
            found = functional.scaled_dot_product_attention(part, part, part)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, context_parallel.sequences.share(expected, 2), rtol=1.6e-2, atol=1e-2)
    exact = whole.clone().requires_grad_()
    functional.scaled_dot_product_attention(exact, exact, exact).square().sum().backward()
    expected.float().square().sum().backward()
    found.float().square().sum().backward()
    torchs_error = (reference.grad - exact.grad).abs().max()
    assert (part.grad - context_parallel.sequences.share(exact.grad, 2)).abs().max() <= 4 * torchs_error


def attends_without_batch(strategy: str) -> None:
    import torch
    from torch.nn import functional

    context_parallel = context(strategy)
    whole = torch.randn(12, 24, 8, generator=torch.Generator().manual_seed(1))
    part = context_parallel.sequences.share(whole, 1)
    expected = functional.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
    with context_parallel.split():
        found = functional.scaled_dot_product_attention(part, part, part, is_causal=True)
    torch.testing.assert_close(found, context_parallel.sequences.share(expected, 1), rtol=1e-5, atol=1e-6)


def drops_weights() -> None:
    """Only in Ulysses, and as many as torch does."""
    import torch
    from torch.nn import functional

    torch.manual_seed(torch.distributed.get_rank())
    values = torch.ones(1, 12, 40, 8)
    with context("ulysses").split():
        found = functional.scaled_dot_product_attention(torch.zeros_like(values), values, values, dropout_p=0.5)
    assert 0.9 < float(found.mean()) < 1.1
    assert float(found.std()) > 0.05


def subgroups_attend_alone() -> None:
    """Groups of other ranks than those of the world, as a mesh makes them."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    from accelerate_cpp.parallel.context.context import ContextParallel

    groups = [dist.new_group([1, 0]), dist.new_group([3, 2])] if dist.get_world_size() == 4 else [dist.group.WORLD]
    number = dist.get_rank() // 2 if len(groups) == 2 else 0
    whole = torch.randn(1, 12, 24, 8, generator=torch.Generator().manual_seed(number))
    expected = functional.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
    for strategy in STRATEGIES:
        context_parallel = ContextParallel(groups[number], strategy)
        part = context_parallel.sequences.share(whole, 2)
        with context_parallel.split():
            found = functional.scaled_dot_product_attention(part, part, part, is_causal=True)
        torch.testing.assert_close(context_parallel.whole(found, 2), expected, rtol=1e-5, atol=1e-6)


# How sequences are split.


def splits_as_torch_does() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

    rank, size = dist.get_rank(), dist.get_world_size()
    length = 2 * size * 5
    order = _HeadTailLoadBalancer(length, size, "cpu")._generate_indices()[0].view(size, -1)[rank]
    numbers = torch.arange(3 * length * 2).view(3, length, 2)
    for strategy in ("allgather", "alltoall"):
        share = context(strategy).sequences.share(numbers, 1)
        assert torch.equal(share, numbers[:, order])
        assert torch.equal(context(strategy).whole(share, 1), numbers)
        assert torch.equal(context(strategy).whole(share.movedim(1, 0), 0), numbers.movedim(1, 0))
    share = context("ulysses").sequences.share(numbers, -2)
    assert torch.equal(share, numbers.chunk(size, 1)[rank])
    assert torch.equal(context("ulysses").whole(share, -2), numbers)


def restores_buffers(strategy: str) -> None:
    import torch

    context_parallel = context(strategy)
    length = 2 * context_parallel.sequences.size * 2
    tokens, positions = torch.arange(2 * length).view(2, length), torch.arange(length)
    shared = torch.arange(length).expand(3, length)
    view, address, values = tokens[:, 1:], tokens.data_ptr(), tokens.clone()
    expected = context_parallel.sequences.share(tokens, 1)
    with context_parallel.split([tokens, positions, shared], [1, 0, -1], {positions}):
        assert torch.equal(tokens, expected)
        assert len(positions) == shared.shape[1] == tokens.shape[1] == length // context_parallel.sequences.size
        assert view.shape == (2, length - 1)
    assert torch.equal(tokens, values)
    assert tokens.data_ptr() == address
    assert torch.equal(shared, torch.arange(length).expand(3, length))
    assert torch.equal(positions, expected[0])

    with pytest.raises(KeyError), context_parallel.split([tokens], [1]):
        raise KeyError
    assert torch.equal(tokens, values)


def restores_attention_after_errors_and_nested_blocks(strategy: str) -> None:
    import torch
    from torch.nn import functional
    from torch.utils import checkpoint

    def replaced() -> list[Any]:
        return [
            functional.scaled_dot_product_attention,
            checkpoint._CheckpointFrame.__init__,
            checkpoint.CheckpointFunction.apply,
            functional.multi_head_attention_forward,
            torch.backends.mha.get_fastpath_enabled(),
            torch._C._dispatch_dump("aten::scaled_dot_product_attention"),
        ]

    before = replaced()
    whole = torch.randn(1, 12, 24, 8, generator=torch.Generator().manual_seed(1))
    outer, inner = context(strategy), context("ulysses")
    tokens, numbers = torch.arange(24), torch.arange(24)
    for error in (None, KeyError):
        with outer.split([tokens], [0]):
            split, within = tokens.clone(), replaced()
            try:
                with inner.split([numbers], [0]):
                    part = inner.sequences.share(whole, 2)
                    found = inner.whole(functional.scaled_dot_product_attention(part, part, part, is_causal=True), 2)
                    if error is not None:
                        raise error
            except KeyError:
                pass
            assert replaced() == within
            assert torch.equal(tokens, split)
            assert len(numbers) == 24
            part = outer.sequences.share(whole, 2)
            found_after = outer.whole(functional.scaled_dot_product_attention(part, part, part, is_causal=True), 2)
        assert replaced() == before
        expected = functional.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found_after, expected, rtol=1e-5, atol=1e-6)


def refuses_what_it_cannot_split() -> None:
    import torch

    from accelerate_cpp.parallel.context.context import ContextParallel

    ring, ulysses = context("alltoall"), context("ulysses")
    size = ring.sequences.size
    good, odd = torch.zeros(2, 4 * size), torch.zeros(3, 4 * size + 1)

    def enter(context_parallel: Any, *arguments: Any) -> Callable[[], None]:
        def call() -> None:
            with context_parallel.split(*arguments):
                raise AssertionError("not refused")

        return call

    all_refused(
        [
            (
                f"buffer 1 has {4 * size + 1} tokens in dimension 1, which cannot be split over {size} processes with "
                f"two chunks of tokens each: its length must be a multiple of {2 * size}; pad it to {6 * size}",
                enter(ring, [good, odd], [1, 1]),
            ),
            (f"must be a multiple of {size}; pad it to {5 * size}", enter(ulysses, [good, odd], [1, 1])),
            ("buffer 0 has shape", enter(ring, [good], [2])),
            ("got 2 buffers and 1 buffer_seq_dims", enter(ring, [good, odd], [1])),
            ("buffer 0 of context parallelism is a list", enter(ring, [[1]], [0])),
            ("requires a gradient", enter(ring, [good.clone().requires_grad_()], [1])),
            ("same tensor as an earlier one", enter(ring, [good, good], [1, 1])),
            ("no_restore_buffers[0] of context parallelism is none", enter(ring, [good], [1], [odd])),
            ("no strategy 'ring'; use one of 'allgather'", lambda: ContextParallel(ring.group, "ring")),
        ]
    )
    assert good.shape == (2, 4 * size)


def refuses_what_it_cannot_compute() -> None:
    import torch
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention as named

    ring, gathering, ulysses = context("alltoall"), context("allgather"), context("ulysses")

    def calling(context_parallel: Any, *tensors: Any, buffers: Any = (), **options: Any) -> Callable[[], None]:
        def call() -> None:
            with context_parallel.split(buffers, [0] * len(buffers)):
                named(*tensors, **options)

        return call

    def drawn(heads: int, tokens: int, dim: int = 8, rows: int = 1, dtype: Any = None) -> Any:
        return torch.randn(rows, heads, tokens, dim, dtype=dtype)

    four, six, odd = drawn(4, 4), drawn(4, 6), drawn(4, 3)
    mask = torch.ones(4, 4, dtype=torch.bool)
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    rows = torch.randn(1, 4, 8)

    def asks_for_weights() -> None:
        with ring.split():
            module(rows, rows, rows)

    def pads() -> None:
        with ring.split():
            module(rows, rows, rows, key_padding_mask=torch.zeros(1, 4, dtype=torch.bool), need_weights=False)

    class _Labelled(torch.Tensor):
        pass

    prime, labelled = drawn(5, 4), four.as_subclass(_Labelled)
    calls = [
        ("cannot apply attn_mask", calling(each, four, four, four, attn_mask=mask))
        for each in (ring, gathering, ulysses)
    ]
    calls += [
        ("cannot drop attention weights (dropout_p=0.1)", calling(each, four, four, four, dropout_p=0.1))
        for each in (ring, gathering)
    ]
    calls += [
        ("4 queries, 6 keys and 6 values here", calling(ring, four, six, six)),
        ("4 queries, 6 keys and 6 values here", calling(ulysses, four, six, six)),
        ("has 3 tokens here; pad sequences to a multiple of", calling(ring, odd, odd, odd, is_causal=True)),
        ("enable_gqa=False; expand them", calling(ring, four, drawn(2, 4), drawn(2, 4))),
        ("enable_gqa=True; expand them", calling(ring, four, drawn(3, 4), drawn(3, 4), enable_gqa=True)),
        ("one batch size", calling(ring, four, drawn(4, 4, rows=2), drawn(4, 4, rows=2))),
        ("one head_dim", calling(ring, four, drawn(4, 4, dim=6), four)),
        ("(batch, heads, tokens, head_dim)", calling(ring, four[0, 0], four[0, 0], four[0, 0])),
        ("as plain tensors, but got Tensor, _Labelled; pass the parts", calling(ring, labelled, four, four)),
        ("one floating-point dtype", calling(ring, four, four, four.double())),
        ("but attention has 5 heads; use a number of processes that divides 5", calling(ulysses, prime, prime, prime)),
        (
            "attention was called for 4 tokens here, but the buffers that were split have 6",
            calling(ring, four, four, four, buffers=[torch.zeros(6 * ring.sequences.size)]),
        ),
        ("call it with need_weights=False", asks_for_weights),
        ("cannot apply attn_mask", pads),
    ]
    all_refused(calls)
    named(four, six, six, attn_mask=torch.ones(4, 6, dtype=torch.bool), dropout_p=0.1)  # outside, all is torch's


# How models get to it.


def intercepts_every_way_to_call(strategy: str) -> None:
    import torch
    from torch.nn import functional
    from torch.nn.functional import scaled_dot_product_attention as named

    context_parallel = context(strategy)
    whole = torch.randn(1, 12, 24, 8, generator=torch.Generator().manual_seed(1))
    expected = functional.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
    part = context_parallel.sequences.share(whole, 2)
    with context_parallel.split():
        for number, function in enumerate(
            [
                lambda *arguments: torch.nn.functional.scaled_dot_product_attention(*arguments),
                named,
                torch.ops.aten.scaled_dot_product_attention,
                torch.ops.aten.scaled_dot_product_attention.default,
            ]
        ):
            found = function(part, part, part, None, 0.0, True)
            torch.testing.assert_close(
                found, context_parallel.sequences.share(expected, 2), rtol=1e-5, atol=1e-6, msg=f"way {number}"
            )


def computes_encoders_of_torch(strategy: str) -> None:
    """Training, and evaluation, which has a fused path of its own; causal by a mask with a hint, and not causal."""
    import torch
    from torch import nn

    context_parallel = context(strategy)
    tokens, here = 24, 24 // context_parallel.sequences.size
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 12, 16, 0.0, batch_first=True), 2)
    inputs = torch.randn(2, tokens, 48)

    def causal_mask(length: int) -> Any:
        return nn.Transformer.generate_square_subsequent_mask(length)

    for training, causal in itertools.product((True, False), (True, False)):
        encoder.train(training)
        with torch.set_grad_enabled(training):
            expected = encoder(inputs, causal_mask(tokens) if causal else None, is_causal=causal)
            rows = inputs.clone()
            with context_parallel.split([rows], [1]):
                found = encoder(rows, causal_mask(here) if causal else None, is_causal=causal)
        torch.testing.assert_close(
            found, context_parallel.sequences.share(expected, 1), rtol=1e-5, atol=1e-5, msg=f"{training=} {causal=}"
        )


def leaves_hooks_of_others(strategy: str) -> None:
    """What is saved for a backward pass still goes where hooks around the block put it, and buffers as split."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks
    from torch.nn import functional

    packed: list[Any] = []

    def pack(tensor: Any) -> int:
        packed.append(tensor)
        return len(packed) - 1

    context_parallel = context(strategy)
    tokens = torch.arange(4 * context_parallel.sequences.size)
    part = context_parallel.sequences.share(tokens, 0)
    table = torch.ones(len(tokens), 3, requires_grad=True)
    with saved_tensors_hooks(pack, lambda index: packed[index]), context_parallel.split([tokens], [0]):
        rows = functional.embedding(tokens, table)
    assert len(packed) == 1
    assert torch.equal(packed[0], part)
    rows.sum().backward()
    assert torch.equal(table.grad.sum(1) == 3, torch.isin(tokens, part))


def transformer() -> Any:
    """A causal one, of modules that call torch's attention; its positions are an argument."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(PLACES, WIDTH)
            self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.projections, self.output = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.wide = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            self.angles = nn.Buffer(10.0 ** -torch.arange(2.0), persistent=False)

        def rotated(self, heads: Any, positions: Any) -> Any:
            angles = positions[:, None, :, None] * self.angles
            left, right = heads.chunk(2, -1)
            return torch.cat(
                [left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1
            )

        def forward(self, rows: Any, positions: Any) -> Any:
            rows = rows + self.places(positions)
            query, key, value = self.projections(self.before(rows)).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
            query, key, value = (
                each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (query, key, value)
            )
            query, key = self.rotated(query, positions), self.rotated(key, positions)
            heads = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            rows = rows + self.output(heads.transpose(1, 2).flatten(2))
            return rows + self.wide(self.between(rows))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList([Layer(), Layer()])
            self.words = nn.Linear(WIDTH, VOCABULARY)
            self.checkpointing: Callable[..., Any] | None = None
            self.positions_by_closure = False

        def forward(self, tokens: Any, positions: Any) -> Any:
            rows = self.tokens(tokens)
            for layer in self.layers:
                if self.checkpointing is None:
                    rows = layer(rows, positions)
                elif self.positions_by_closure:
                    rows = self.checkpointing(partial(layer, positions=positions), rows)
                else:
                    rows = self.checkpointing(layer, rows, positions)
            return self.words(rows)

    torch.manual_seed(0)
    return Model()


def llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=VOCABULARY,
                    hidden_size=WIDTH,
                    intermediate_size=24,
                    num_hidden_layers=2,
                    num_attention_heads=HEADS,
                    num_key_value_heads=2,
                    attn_implementation="sdpa",
                )
            )

        def forward(self, tokens: Any, positions: Any) -> Any:
            return self.whole(input_ids=tokens, position_ids=positions).logits

    torch.manual_seed(0)
    return Words()


def sentences(step: int, tokens: int) -> tuple[Any, Any, Any]:
    """Tokens, the ones that follow each, and positions, of a few sequences."""
    import torch

    drawn = torch.randint(VOCABULARY, (ROWS, tokens + 1), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous(), torch.arange(tokens).repeat(ROWS, 1)


@contextmanager
def whole_sequences(*_buffers: Any) -> Iterator[None]:
    yield


def losses_of(model: Any, tokens: int, split: Callable[..., Any], backward_within: bool, reduce: Any) -> list[float]:
    """The losses of steps of SGD; ``reduce`` averages a tensor over the processes."""
    import torch
    from torch.nn import functional

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        inputs, following, positions = sentences(step, tokens)
        with split([inputs, following, positions], [1, 1, 1]):
            loss = functional.cross_entropy(model(inputs, positions).flatten(0, 1), following.flatten())
            if backward_within:
                loss.backward()
        if not backward_within:
            loss.backward()
        assert inputs.shape == following.shape == positions.shape == (ROWS, tokens)
        for parameter in model.parameters():
            reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        reduce(losses[-1])
    return [float(loss) for loss in losses]


def trains_like_one_process(
    strategy: str, make: Callable[[], Any], backward_within: bool = True, change: Callable[[Any], None] | None = None
) -> None:
    import torch
    import torch.distributed as dist

    def averaged(tensor: Any) -> None:
        dist.all_reduce(tensor, dist.ReduceOp.SUM)
        tensor /= dist.get_world_size()

    context_parallel = context(strategy)
    tokens = 4 * context_parallel.sequences.size
    expected = losses_of(make(), tokens, whole_sequences, True, lambda _tensor: None)
    model = make()
    if change is not None:
        change(model)
    found = losses_of(model, tokens, context_parallel.split, backward_within, averaged)
    assert expected[-1] != expected[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def without_masks(model: Any) -> None:
    from accelerate_cpp.plugins.split_sequences import _attach_context_parallel_hooks

    _attach_context_parallel_hooks(model.whole)


def checkpointed(model: Any, use_reentrant: bool, positions_by_closure: bool = False) -> None:
    from torch.utils.checkpoint import checkpoint  # as models hold it: imported before a block begins

    model.checkpointing = partial(checkpoint, use_reentrant=use_reentrant)
    model.positions_by_closure = positions_by_closure


def wrapped_in_checkpoints(model: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer)


def llama_checkpointed(model: Any, use_reentrant: bool) -> None:
    without_masks(model)
    model.whole.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.train()


def compiled(model: Any) -> None:
    for layer in model.layers:
        layer.compile(backend="aot_eager")


def trainings(strategies: tuple[str, ...] = STRATEGIES) -> dict[str, Callable[[], None]]:
    return {
        f"{strategy}, backward {'within' if within else 'after'} the block": partial(
            trains_like_one_process, strategy, transformer, within
        )
        for strategy, within in itertools.product(strategies, (True, False))
    }


def checkpointed_trainings(strategies: tuple[str, ...]) -> dict[str, Callable[[], None]]:
    changes = {
        "reentrant checkpoints": partial(checkpointed, use_reentrant=True),
        "checkpoints": partial(checkpointed, use_reentrant=False),
        "reentrant checkpoints of closures": partial(checkpointed, use_reentrant=True, positions_by_closure=True),
        "checkpoints of closures": partial(checkpointed, use_reentrant=False, positions_by_closure=True),
        "wrapped in checkpoints": wrapped_in_checkpoints,
    }
    return {
        f"{strategy}, {name}, backward {'within' if within else 'after'} the block": partial(
            trains_like_one_process, strategy, transformer, within, change
        )
        for strategy, (name, change), within in itertools.product(strategies, changes.items(), (True, False))
    }


def llama_trainings() -> dict[str, Callable[[], None]]:
    changes = {
        "Llama": without_masks,
        "Llama with checkpoints": partial(llama_checkpointed, use_reentrant=False),
        "Llama with reentrant checkpoints": partial(llama_checkpointed, use_reentrant=True),
    }
    return {
        f"{strategy}, {name}, backward {'within' if within else 'after'} the block": partial(
            trains_like_one_process, strategy, llama, within, change
        )
        for strategy, (name, change), within in itertools.product(STRATEGIES, changes.items(), (True, False))
    }


def compiles_once_for_all_blocks(strategy: str) -> None:
    import torch

    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    context_parallel = context(strategy)
    model = transformer()
    for layer in model.layers:
        layer.compile(backend=backend)
    numbers = []
    for step in range(3):
        inputs, _, positions = sentences(step, 4 * context_parallel.sequences.size)
        with context_parallel.split([inputs, positions], [1, 1]):
            model(inputs, positions).sum().backward()
        numbers.append(len(graphs))
    assert numbers == [2, 2, 2]  # before and after attention, of all layers
    torch._dynamo.reset()


def refuses_attention_inside_of_graphs() -> None:
    import torch
    from torch.nn.functional import scaled_dot_product_attention as named

    @torch.compile(backend="aot_eager")
    def attends(rows: Any) -> Any:
        return named(rows, rows, rows, is_causal=True)

    rows = torch.randn(1, 12, 4, 8)
    with pytest.raises(Exception, match="cannot be compiled into a graph"), context("alltoall").split():
        attends(rows)
    torch._dynamo.reset()
    torch.testing.assert_close(attends(rows), named(rows, rows, rows, is_causal=True))


def compiled_trainings() -> dict[str, Callable[[], None]]:
    trained = {
        f"{strategy}, compiled, {within=}": partial(trains_like_one_process, strategy, transformer, within, compiled)
        for strategy, within in itertools.product(STRATEGIES, (True, False))
    }
    return {
        "inside of graphs": refuses_attention_inside_of_graphs,
        **for_all(compiles_once_for_all_blocks),
        **trained,
    }


def for_all(function: Callable[[str], None]) -> dict[str, Callable[[], None]]:
    return {f"{function.__name__} {strategy}": partial(function, strategy) for strategy in STRATEGIES}


def blocks_of_all_kinds() -> dict[str, Callable[[], None]]:
    return {
        "splits as torch does": splits_as_torch_does,
        "refuses what it cannot split": refuses_what_it_cannot_split,
        "refuses what it cannot compute": refuses_what_it_cannot_compute,
        "drops weights": drops_weights,
        "subgroups": subgroups_attend_alone,
        **for_all(restores_buffers),
        **for_all(restores_attention_after_errors_and_nested_blocks),
        **for_all(intercepts_every_way_to_call),
        **for_all(computes_encoders_of_torch),
        **for_all(leaves_hooks_of_others),
        **for_all(casts_under_autocast),
        **for_all(attends_without_batch),
    }


CORE = {
    "attention": few_attentions,
    "blocks": blocks_of_all_kinds,
    "training": trainings,
    "checkpoints": partial(checkpointed_trainings, ("alltoall",)),
}
BULK = {
    "attention": many_attentions,
    "blocks": blocks_of_all_kinds,
    "training": trainings,
    "checkpoints": partial(checkpointed_trainings, STRATEGIES),
    "Llama": llama_trainings,
    "compiled": compiled_trainings,
}


def run(kinds: list[str], of_bulk: bool, backend: str) -> dict[str, str]:
    scenarios: dict[str, Callable[[], None]] = {}
    for kind in kinds:
        scenarios |= (BULK if of_bulk else CORE)[kind]()
    assert scenarios
    return failures_of(scenarios, backend)


def check(size: int, kinds: list[str], *, of_bulk: bool, backend: str) -> None:
    of_ranks = run_processes(run, size, kinds, of_bulk, backend, timeout=280)
    failures = [
        f"rank {rank}, {name}:\n{text}" for rank, failed in enumerate(of_ranks) for name, text in failed.items()
    ]
    assert not failures, "\n".join(failures)


def test_split_sequences_are_computed_as_whole_ones_by_two_processes() -> None:
    check(2, list(CORE), of_bulk=False, backend="shm")


def test_split_sequences_are_computed_as_whole_ones_by_three_processes_over_gloo() -> None:
    check(3, ["attention"], of_bulk=False, backend="gloo")


@pytest.mark.long
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("kind", [kind for kind in BULK if kind != "compiled"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_split_sequences_are_computed_as_whole_ones(size: int, kind: str, backend: str) -> None:
    check(size, [kind], of_bulk=True, backend=backend)


@pytest.mark.long
def test_split_sequences_are_computed_as_whole_ones_by_compiled_models() -> None:
    check(2, ["compiled"], of_bulk=True, backend="shm")


def one_process_needs_no_attention_of_its_own() -> None:
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    from accelerate_cpp.parallel.context.attention import attention

    original = functional.scaled_dot_product_attention
    tokens = torch.arange(7)
    inputs, mask = torch.randn(1, 2, 7, 4), torch.rand(7, 7) > 0.2
    for strategy in STRATEGIES:
        with context(strategy).split([tokens], [0]):
            assert len(tokens) == 7
            assert functional.scaled_dot_product_attention is original
        assert torch.equal(context(strategy).whole(tokens, 0), tokens)
        found = attention(inputs, inputs, inputs, mask, group=dist.group.WORLD, strategy=strategy)
        assert torch.equal(found, original(inputs, inputs, inputs, mask))


def run_alone() -> dict[str, str]:
    return failures_of({"alone": one_process_needs_no_attention_of_its_own}, "shm")


def test_one_process_needs_no_attention_of_its_own() -> None:
    assert run_processes(run_alone, 1) == [{}]
