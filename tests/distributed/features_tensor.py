"""Checks of DTensor, of tensor, sequence and context parallelism."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor import ones as distributed_ones
from torch.distributed.tensor import randn as distributed_randn
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel, local_map
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from features_common import (
    HIDDEN,
    INPUTS,
    Ranks,
    batch,
    check,
    check_weights,
    network,
    optimizer_for,
    refused,
    train,
    whole,
)


def matrix(rows: int = 7, columns: int = 5) -> Tensor:
    """Rows and columns that no number of ranks here divides."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def redistribution(ranks: Ranks) -> None:
    mesh, data = ranks.mesh(), matrix()
    for source, target in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
        moved = distribute_tensor(data, mesh, [source]).redistribute(mesh, [target])
        check(moved.to_local(), distribute_tensor(data, mesh, [target]).to_local())
        check(moved.full_tensor(), data)


def partial_sums(ranks: Ranks) -> None:
    mesh = ranks.mesh()
    parts = [part.view(7, 5) for part in ranks.everyone(35)]
    for kind, expected in {
        "sum": torch.stack(parts).sum(0),
        "avg": torch.stack(parts).mean(0),
        "max": torch.stack(parts).max(0).values,
        "min": torch.stack(parts).min(0).values,
    }.items():
        for target in (Replicate(), Shard(0), Shard(1)):
            partial = DTensor.from_local(parts[ranks.rank], mesh, [Partial(kind)])
            check(partial.redistribute(mesh, [target]).full_tensor(), expected, 1e-6)


def redistribution_in_two_dimensions(ranks: Ranks) -> None:
    mesh, data = ranks.mesh(2, 2, names=("a", "b")), matrix()
    placements: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1))
    for source, target in itertools.product(itertools.product(placements, repeat=2), repeat=2):
        moved = distribute_tensor(data, mesh, source).redistribute(mesh, target)
        check(moved.to_local(), distribute_tensor(data, mesh, target).to_local())


def operations(ranks: Ranks) -> None:
    """Sharded operands of a product, a softmax and a mean, and the gradients of them."""
    mesh = ranks.mesh()
    left, right = matrix(7, 6), matrix(6, 5)
    for placements in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
        ours = [distribute_tensor(t, mesh, [p]) for t, p in zip((left, right), placements, strict=True)]
        theirs = [left.clone(), right.clone()]
        for tensors in (ours, theirs):
            for tensor in tensors:
                tensor.requires_grad_()
            (tensors[0] @ tensors[1]).softmax(1).square().mean().backward()
        for own, other in zip(ours, theirs, strict=True):
            check(own.grad.full_tensor(), other.grad, 1e-6)


def distributed_module(ranks: Ranks) -> None:
    """Parameters of rank 0 are spread; inputs come in parts of the batch."""
    mesh = ranks.mesh()

    def shard(name: str, module: nn.Module, mesh: dist.DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)])))

    torch.manual_seed(ranks.rank)
    module = distribute_module(nn.Linear(INPUTS, HIDDEN), mesh, shard)
    torch.manual_seed(0)
    expected = nn.Linear(INPUTS, HIDDEN)
    check_weights(module, expected, 0.0)
    inputs, _ = batch(0)
    result = module(distribute_tensor(inputs, mesh, [Shard(0)]))
    check(result.full_tensor().detach(), expected(inputs).detach(), 1e-6)


def mapped_locally(ranks: Ranks) -> None:
    mesh = ranks.mesh()

    def product(left: Tensor, right: Tensor) -> Tensor:
        return left @ right

    mapped = local_map(product, out_placements=[Partial()], in_placements=([Shard(1)], [Shard(0)]), device_mesh=mesh)
    left, right = matrix(4, 6), matrix(6, 5)
    result = mapped(distribute_tensor(left, mesh, [Shard(1)]), distribute_tensor(right, mesh, [Shard(0)]))
    check(result.full_tensor(), left @ right, 1e-5)


def tensor_parallel(ranks: Ranks) -> None:
    """One all-reduce forward, none in the backward of the replicated inputs' weights."""
    module = network()
    parallelize_module(module, ranks.mesh(), {"first": ColwiseParallel(), "second": RowwiseParallel()})
    with CommDebugMode() as communication:
        module(batch(0)[0])
    assert communication.get_total_counts() == 1
    check_weights(train(module), train(network()))


class Block(nn.Module):
    """Norms around a network whose hidden layer is divided, for sequences of embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(tokens))
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        logits: Tensor = self.head(hidden)
        return logits


def block() -> Block:
    torch.manual_seed(0)
    return Block()


def tokens(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(12, (2, 9), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


def trained_on_tokens(module: nn.Module, parallel_loss: bool = False) -> nn.Module:
    optimizer = optimizer_for(module)
    for step in range(3):
        inputs, targets = tokens(step)
        logits = module(inputs)
        if parallel_loss:
            with loss_parallel():
                nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        else:
            nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module


def sequence_parallel(ranks: Ranks) -> None:
    """Norms work on parts of the sequence; gathers and scattered sums stand around the divided layers."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    module = block()
    parallelize_module(module, ranks.mesh(), plan)
    parallelize_module(module, ranks.mesh(), {"up": ColwiseParallel(use_local_output=False)})
    check_weights(trained_on_tokens(module), trained_on_tokens(block()))


def parallel_loss(ranks: Ranks) -> None:
    """Cross entropy of logits that are divided over the classes."""
    module = block()
    parallelize_module(module, ranks.mesh(), {"head": ColwiseParallel(use_local_output=False)})
    check_weights(trained_on_tokens(module, parallel_loss=True), trained_on_tokens(block()))


def prepared_output(ranks: Ranks) -> None:
    module = nn.Sequential(nn.Identity())
    output = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    parallelize_module(module, ranks.mesh(), {"0": output})
    own = matrix(8, 5).chunk(ranks.size)[ranks.rank]
    check(module(own), matrix(8, 5))


def tensor_parallel_and_fully_sharded(ranks: Ranks) -> None:
    mesh = ranks.mesh(2, 2, names=("dp", "tp"))
    module = network()
    parallelize_module(module, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(module.first, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    train(module, part=mesh.get_local_rank("dp"), parts=2)
    check_weights(module, train(network()))


def compiled(ranks: Ranks) -> None:
    torch._dynamo.reset()
    module = network()
    parallelize_module(module, ranks.mesh(), {"first": ColwiseParallel(), "second": RowwiseParallel()})
    train(torch.compile(module, backend="aot_eager", fullgraph=True), optimizer_for(module))
    check_weights(module, train(network()))


def attention_over_ranks(ranks: Ranks, causal: bool) -> None:
    mesh = ranks.mesh(names=("cp",))
    generator = torch.Generator().manual_seed(0)
    whole_operands = [torch.randn(2, 4, 16, 8, generator=generator) for _ in range(3)]
    expected_operands = [operand.clone().requires_grad_() for operand in whole_operands]
    with sdpa_kernel(SDPBackend.MATH):
        expected = nn.functional.scaled_dot_product_attention(*expected_operands, is_causal=causal)
        expected.square().sum().backward()
        operands = [operand.clone() for operand in whole_operands]
        with context_parallel(mesh, buffers=operands, buffer_seq_dims=[2, 2, 2]):
            leaves = [operand.detach().requires_grad_() for operand in operands]
            result = nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
            result.square().sum().backward()
    whole_results = context_parallel_unshard(mesh, [result.detach(), *(leaf.grad for leaf in leaves)], [2] * 4)
    check(whole_results[0], expected.detach(), 1e-5)
    for own, other in zip(whole_results[1:], expected_operands, strict=True):
        check(own, other.grad, 1e-5)


def context_parallel_attention(ranks: Ranks) -> None:
    attention_over_ranks(ranks, causal=False)


def causal_context_parallel_refused(ranks: Ranks) -> None:
    with refused("got mixed torch.Tensor and DTensor"):
        attention_over_ranks(ranks, causal=True)


def made_on_all_ranks(ranks: Ranks) -> None:
    check(whole(distributed_ones(7, 5, device_mesh=ranks.mesh(), placements=[Shard(0)])), torch.ones(7, 5))


def random_tensors_refused(ranks: Ranks) -> None:
    with refused("", kind=AssertionError, by="_dtensor_init_helper"):
        distributed_randn(7, 5, device_mesh=ranks.mesh(), placements=[Shard(0)])
