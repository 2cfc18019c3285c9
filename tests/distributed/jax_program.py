"""What two processes try out with accelerate_cpp.jax, in one start of each, since JAX takes seconds to import.

``python jax_program.py FOLDER`` leaves what it found there, as JSON by rank.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as functional

import accelerate_cpp.jax as ours
from accelerate_cpp.errors import CheckpointError, InvalidArgument, MismatchedCollective, OtherRankFailed
from jax_program_data import DTYPES, values

warnings.filterwarnings("ignore", "torch.distributed.nn.functional", FutureWarning)
FOUND: dict[str, Any] = {}
FOLDER = Path(sys.argv[1])


def refusal(call: Callable[[], object], kind: type[Exception] | tuple[type[Exception], ...]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind} was raised")


def check_dtypes() -> None:
    """What each collective gives, as float64, for every dtype; the test knows what NumPy makes of the same."""
    rank = ours.rank()
    for dtype in DTYPES:
        operand = jnp.asarray(values(rank, dtype), dtype)
        tried: dict[str, Callable[[Any], Any]] = {
            "all_gather": ours.all_gather,
            "tiled": lambda x: ours.all_gather(x, tiled=True),
            "broadcast": lambda x: ours.broadcast(x, root=1),
            "sum": ours.all_reduce,
            "scattered": ours.reduce_scatter,
            "max": lambda x: ours.all_reduce(x, "max"),
        }
        if dtype in ("uint16", "uint32"):
            FOUND[f"no max of {dtype}"] = refusal(lambda: tried["max"](operand), InvalidArgument)  # noqa: B023
            del tried["max"]
        for name, call in tried.items():
            outside, inside = call(operand), jax.jit(call)(operand)
            assert outside.dtype == inside.dtype == operand.dtype
            assert (outside == inside).all()
            FOUND[f"{name} {dtype}"] = np.asarray(outside).astype(np.float64).tolist()
    half_bytes = jnp.ones(5, jnp.int4)
    for call in (ours.all_gather, jax.jit(ours.broadcast)):
        assert "at least 8 bits" in refusal(lambda: call(half_bytes), InvalidArgument)  # noqa: B023


def check_order() -> None:
    """Many collectives of one program that nothing but their order connects: each rank would notice another order."""
    rank = ours.rank()

    @jax.jit
    def interleaved(x: Any, go_on: Any) -> Any:
        parts = []
        for number in range(12):
            parts.append(ours.all_reduce(x * number, "sum").sum())
            parts.append(ours.broadcast(x[number % 3 :] + number, root=number % 2).sum())
            parts.append(ours.all_gather(x[: number % 3 + 1]).sum())
        ours.all_reduce(jnp.ones(7))  # nobody uses the result; the other ranks wait for it all the same

        def body(carry: Any, number: Any) -> tuple[Any, Any]:
            carry = ours.all_reduce(carry, "mean")
            carry = jax.lax.cond(
                number % 2 == 0, lambda c: ours.broadcast(c, 1) + 1, lambda c: ours.all_reduce(c, "max") * 2, carry
            )
            ours.barrier()
            return carry, ours.reduce_scatter(jnp.stack([carry, carry])).sum()

        carry, rows = jax.lax.scan(body, x, jnp.arange(5))
        carry = jax.lax.while_loop(lambda c: c.sum() < go_on, lambda c: ours.all_reduce(c) + 1, carry)
        return jnp.stack([*parts, *rows, carry.sum()])

    def far(a: Any) -> Any:
        for _ in range(6):
            a = jnp.tanh(a @ a)
        return a

    @jax.jit
    def staggered(a: Any) -> Any:
        """What XLA could carry out first differs between the ranks, and nobody needs the results in this order."""
        near, distant = (a + 1, far(a)) if rank else (far(a), a + 1)
        sums = [ours.all_reduce(near).sum(), ours.broadcast(distant, root=1).sum()]
        sums.append(ours.all_gather(far(a) if rank else a).sum())
        sums.append(ours.reduce_scatter(a if rank else far(a), tiled=True).sum())
        return sums[::-1]

    FOUND["staggered"] = [round(float(each), 3) for each in staggered(jnp.eye(64) / 8)]

    @jax.jit
    def beside(a: Any) -> Any:
        return ours.all_gather(a if rank else far(a)).sum()

    # Rank 0 comes to torch's collective while its program still computes, rank 1 after its own has ended.
    gathered_sum, ones = beside(jnp.eye(700) / 8), torch.ones(1)
    dist.all_reduce(ones)
    FOUND["beside"] = [ones.item(), round(float(gathered_sum), 3)]
    x = jnp.arange(4.0) + rank
    first = interleaved(x, 2000.0)
    again = [interleaved(x, 2000.0) for _ in range(20)]  # without waiting for one before the next is issued
    assert all((one == first).all() for one in again)
    gathered = ours.all_gather(first)
    FOUND["interleaved"] = bool((gathered[0] == gathered[1]).all())
    FOUND["first sum"] = float(first[3])
    counted = [float(ours.all_reduce(jnp.float32(number))) for number in range(50)]
    FOUND["eager"] = counted == [2.0 * number for number in range(50)]
    with jax.disable_jit():
        FOUND["not compiled"] = float(ours.all_reduce(jnp.float32(rank + 1)))


def check_gradients() -> None:
    """Against torch's functional collectives, whose objective is also the sum over the ranks; and against JAX's own.

    Those combine the rows of a batch in this process, whose objectives are added up.
    """
    rank, world_size = ours.rank(), ours.world_size()
    x = np.linspace(0.5, 1.5, 4, dtype=np.float32) + rank
    weights = np.asarray([1.0, -2.0, 3.0, 0.5], np.float32) * (rank + 1)

    def of_torch(call: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        leaf = torch.tensor(x, requires_grad=True)
        y = call(torch.sin(leaf))
        (y * torch.tensor(np.resize(weights, y.shape)) * y).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.tolist()

    def of_jax(call: Callable[[Any], Any]) -> tuple[list[float], ...]:
        def objective(operand: Any) -> Any:
            y = call(jnp.sin(operand))
            return (y * jnp.asarray(np.resize(weights, y.shape)) * y).sum()

        gradient = jax.grad(objective)
        recomputed = jax.grad(jax.checkpoint(objective))
        return tuple(f(x).tolist() for f in (gradient, jax.jit(gradient), jax.jit(recomputed)))

    def of_rows(call: Callable[[Any], Any]) -> list[float]:
        operands = jnp.stack([jnp.linspace(0.5, 1.5, 4) + each for each in range(world_size)])
        factors = jnp.stack([jnp.asarray([1.0, -2.0, 3.0, 0.5]) * (each + 1) for each in range(world_size)])

        def objective(rows: Any) -> Any:
            def one(operand: Any, row_weights: Any) -> Any:
                y = call(jnp.sin(operand))
                return (y * jnp.resize(row_weights, y.shape) * y).sum()

            return jax.vmap(one, axis_name="ranks")(rows, factors).sum()

        return jax.grad(objective)(operands)[rank].tolist()

    def scattered(leaf: torch.Tensor) -> torch.Tensor:
        return functional.reduce_scatter(torch.empty(2), [*leaf.chunk(world_size)])

    lax: Any = jax.lax
    calls: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
        "all_reduce": (
            lambda t: functional.all_reduce(t.clone()),
            lambda a: lax.psum(a, "ranks"),
            ours.all_reduce,
        ),
        "mean": (
            lambda t: functional.all_reduce(t.clone()) / world_size,
            lambda a: lax.pmean(a, "ranks"),
            lambda a: ours.all_reduce(a, "mean"),
        ),
        "all_gather": (
            lambda t: torch.stack(functional.all_gather(t)),
            lambda a: lax.all_gather(a, "ranks"),
            ours.all_gather,
        ),
        "tiled": (
            lambda t: torch.cat(functional.all_gather(t)),
            lambda a: lax.all_gather(a, "ranks", tiled=True),
            lambda a: ours.all_gather(a, tiled=True),
        ),
        "broadcast": (
            lambda t: functional.broadcast(t.clone(), 1),
            lambda a: lax.all_gather(a, "ranks")[1],
            lambda a: ours.broadcast(a, 1),
        ),
        "reduce_scatter": (
            scattered,
            lambda a: lax.psum_scatter(a, "ranks", tiled=True),
            lambda a: ours.reduce_scatter(a, tiled=True),
        ),
        "scattered mean": (
            lambda t: scattered(t) / world_size,
            lambda a: lax.psum_scatter(a, "ranks", tiled=True) / world_size,
            lambda a: ours.reduce_scatter(a, "mean", tiled=True),
        ),
    }

    def second(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def summed_gradient(operand: Any) -> Any:
            return (jax.grad(lambda a: (call(jnp.sin(a)) ** 3).sum())(operand) ** 2).sum()

        return summed_gradient

    for name, (of_functional, of_lax, own) in calls.items():
        FOUND[f"gradient of {name}"] = [of_torch(of_functional), of_rows(of_lax), *of_jax(own)]
        rows = jnp.stack([jnp.linspace(0.5, 1.5, 4) + each for each in range(world_size)])
        of_all = jax.grad(lambda a, call=of_lax: jax.vmap(second(call), axis_name="ranks")(a).sum())(rows)
        FOUND[f"second of {name}"] = [of_all[rank].tolist(), jax.jit(jax.grad(second(own)))(jnp.asarray(x)).tolist()]
    _, tangent = jax.jvp(ours.all_reduce, (jnp.asarray(x),), (jnp.asarray(weights),))
    FOUND["forward"] = tangent.tolist()
    FOUND["no gradient of max"] = refusal(
        lambda: jax.grad(lambda a: ours.all_reduce(a, "max").sum())(jnp.ones(2)), InvalidArgument
    )

    def looped(a: Any) -> Any:
        carry, _ = jax.lax.scan(lambda c, _: (jnp.sin(ours.all_reduce(c, "mean")), None), a, None, length=3)
        return jax.lax.cond(carry.sum() > 100, lambda c: c, lambda c: ours.all_reduce(c), carry).sum()

    leaf = torch.tensor(x, requires_grad=True)
    y = leaf
    for _ in range(3):
        y = torch.sin(functional.all_reduce(y.clone()) / world_size)
    functional.all_reduce(y.clone()).sum().backward()
    assert leaf.grad is not None
    FOUND["gradient of loops"] = [leaf.grad.tolist(), jax.jit(jax.grad(looped))(jnp.asarray(x)).tolist()]


def check_batches() -> None:
    """What ``vmap`` makes of a collective is what it does to each row."""
    rows = jnp.arange(12.0).reshape(3, 4) + ours.rank()
    for name, call in {
        "all_reduce": ours.all_reduce,
        "all_gather": ours.all_gather,
        "tiled": lambda a: ours.all_gather(a, tiled=True),
        "broadcast": lambda a: ours.broadcast(a, 1),
        "reduce_scatter": lambda a: ours.reduce_scatter(a, tiled=True),
        "reduced rows": lambda a: ours.reduce_scatter(a.reshape(2, 2)),
    }.items():
        for axis in (0, 1):
            operand = jnp.moveaxis(rows, 0, axis)
            batched = jax.jit(jax.vmap(call, in_axes=axis))(operand)
            FOUND[f"vmap of {name} along {axis}"] = bool((batched == jnp.stack([call(row) for row in rows])).all())


def check_data() -> None:
    table = {"x": np.arange(22, dtype=np.float32).reshape(11, 2), "number": np.arange(11, dtype=np.int32)}
    loader = ours.data_loader(table, batch_size=2, shuffle=True, seed=3)
    orders = []
    for _ in range(2):
        seen = []
        for batch in loader:
            assert (batch["x"][:, 0] == 2 * batch["number"]).all()
            seen += ours.gather_for_metrics(batch["number"]).tolist()
        orders.append(seen)
    loader.set_epoch(0)
    repeated = [number for batch in loader for number in ours.gather_for_metrics(batch["number"]).tolist()]
    FOUND["orders"], FOUND["repeated order"] = orders, repeated
    whole = torch.empty(64 * 16).view(64, 16).copy_(torch.arange(64.0).unsqueeze(1))
    addresses = []
    for number, batch in enumerate(ours.data_loader([whole], batch_size=8)):
        at = whole.data_ptr() + (2 * number + ours.rank()) * 8 * 16 * 4
        addresses.append((batch[0].unsafe_buffer_pointer() - at, whole.data_ptr() % 64))
    FOUND["addresses"] = addresses
    from_torch = ours.prepare(torch.utils.data.DataLoader(torch.arange(8), batch_size=2))
    FOUND["prepared"] = [batch.tolist() for batch in from_torch]


def check_checkpoints() -> None:
    rank = ours.rank()
    tree = {
        "params": [jnp.arange(3.0) + 10 * rank, jnp.ones((2, 2), jnp.bfloat16)],
        "key": jax.random.key(5),
        "step": 7 + rank,
        "rate": 0.1,
    }
    ours.save_state(FOLDER / "state", tree)
    template = {"key": jax.eval_shape(lambda: tree["key"])}
    ours.save_state(FOLDER / "key", {"key": tree["key"]} if rank == 0 else None)
    of_template = ours.load_state(FOLDER / "key", template)["key"]
    assert (jax.random.key_data(of_template) == jax.random.key_data(tree["key"])).all()
    plain = {"table": np.asarray([[1.0 + 2.0**-50, 2.0], [3.0, 4.0]]).T, "count": np.int64(2**40)}
    ours.save_state(FOLDER / "plain", plain)
    again = ours.load_state(FOLDER / "plain", jax.tree.map(np.zeros_like, plain) | {"count": np.int64(0)})
    FOUND["of numpy"] = [again["table"].tolist(), again["table"].dtype.name, int(again["count"])]
    FOUND["unsaved"] = refusal(
        lambda: ours.save_state(FOLDER / "unsaved", {"half": jnp.ones(2, jnp.int4)}),
        InvalidArgument if rank == 0 else OtherRankFailed,
    )
    like = jax.tree.map(lambda leaf: leaf * 0 if isinstance(leaf, (int, float)) else jnp.empty_like(leaf), tree)
    loaded = ours.load_state(FOLDER / "state", like)
    assert loaded["params"][1].dtype == jnp.bfloat16
    assert (jax.random.key_data(loaded["key"]) == jax.random.key_data(tree["key"])).all()
    FOUND["loaded"] = [loaded["params"][0].tolist(), loaded["step"], loaded["rate"]]
    renamed = {**like, "parameters": like["params"]}
    del renamed["params"]
    FOUND["renamed"] = refusal(lambda: ours.load_state(FOLDER / "state", renamed), CheckpointError)
    reshaped = {**like, "params": [jnp.zeros(4), like["params"][1]]}
    FOUND["reshaped"] = refusal(lambda: ours.load_state(FOLDER / "state", reshaped), CheckpointError)
    ours.barrier()
    if rank == 0:
        path = FOLDER / "state" / "state.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    ours.barrier()
    FOUND["damaged"] = refusal(lambda: ours.load_state(FOLDER / "state", like), CheckpointError)


def check_mismatches() -> None:
    """All ranks raise alike and go on; inside a program the text is that of the error outside."""
    rank = ours.rank()
    operand = jnp.ones(2 + rank)
    FOUND["mismatch"] = refusal(lambda: ours.all_reduce(operand), MismatchedCollective)

    trees = [jnp.ones(3), jnp.ones(4 + rank), jnp.ones(5)]
    FOUND["mismatched trees"] = refusal(lambda: ours.average_gradients(trees), MismatchedCollective)
    swapped = [jnp.ones(3 + rank), jnp.ones(4 - rank)]
    FOUND["swapped"] = refusal(lambda: ours.average_gradients(swapped), MismatchedCollective)

    @jax.jit
    def program(a: Any) -> Any:
        return ours.all_gather(a) if rank else ours.broadcast(a)

    FOUND["mismatch inside"] = refusal(lambda: jax.block_until_ready(program(jnp.ones(2))), jax.errors.JaxRuntimeError)
    FOUND["between"] = refusal_or_value(lambda: float(ours.all_reduce(jnp.float32(3.0))))

    @jax.jit
    def late(a: Any) -> Any:
        for _ in range(10):
            a = jnp.tanh(a @ a)
        return ours.all_gather(a) if rank else ours.broadcast(a)

    def not_awaited() -> None:
        """The error is met by what comes next; or at once, should JAX not return before the program has ended."""
        late(jnp.eye(700))
        ours.all_reduce(jnp.float32(3.0))

    FOUND["late"] = refusal(not_awaited, (MismatchedCollective, jax.errors.JaxRuntimeError))
    FOUND["after"] = refusal_or_value(lambda: float(ours.all_reduce(jnp.float32(3.0))))


def refusal_or_value(call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def check_refusals() -> None:
    FOUND["refused op"] = refusal(lambda: ours.all_reduce(jnp.ones(1), "average"), InvalidArgument)
    FOUND["refused mean"] = refusal(lambda: ours.all_reduce(jnp.ones(1, jnp.int32), "mean"), InvalidArgument)
    FOUND["refused gradient"] = refusal(lambda: ours.average_gradients({"a": jnp.ones(1, int)}), InvalidArgument)
    FOUND["refused number"] = refusal(lambda: ours.average_gradients({"a": 1}), InvalidArgument)
    FOUND["refused root"] = refusal(lambda: ours.broadcast(jnp.ones(1), root=2), InvalidArgument)
    FOUND["refused rows"] = refusal(lambda: ours.reduce_scatter(jnp.ones(3), tiled=True), InvalidArgument)
    FOUND["refused stack"] = refusal(lambda: ours.reduce_scatter(jnp.ones(3)), InvalidArgument)
    FOUND["refused scalar"] = refusal(lambda: ours.all_gather(jnp.float32(1), tiled=True), InvalidArgument)
    FOUND["refused tracer"] = refusal(lambda: jax.jit(ours.gather_for_metrics)(jnp.ones(1)), InvalidArgument)


def check_averages() -> None:
    """Of many dtypes and sizes at once, against the mean that NumPy computes of both ranks' values."""
    rank = ours.rank()
    shapes = [(), (0,), (3, 5), (200, 300), (70_000,), (1, 1, 1)]
    generators = [np.random.default_rng(each) for each in range(2)]
    trees = [
        [generator.integers(-8, 8, shape).astype(np.float32) for shape in shapes for _ in range(3)]
        for generator in generators
    ]
    dtypes = ["float32", "bfloat16", "float16"] * len(shapes)
    own = [jnp.asarray(leaf, dtype) for leaf, dtype in zip(trees[rank], dtypes, strict=True)]
    expected = [(one + other) / 2 for one, other in zip(*trees, strict=True)]
    for name, average in (("averages", ours.average_gradients), ("averages inside", jax.jit(ours.average_gradients))):
        averages = average(own)
        assert [leaf.dtype for leaf in averages] == [leaf.dtype for leaf in own]
        FOUND[name] = all(
            np.array_equal(np.asarray(found, np.float32), wanted)
            for found, wanted in zip(averages, expected, strict=True)
        )
    replicated = ours.broadcast_parameters({"w": jnp.full(3, float(rank)), "n": jnp.int32(rank)})
    FOUND["broadcast parameters"] = [replicated["w"].tolist(), int(replicated["n"])]


def main() -> None:
    place = [ours.rank(), ours.local_rank(), ours.world_size(), ours.is_main_process(), ours.is_local_main_process()]
    FOUND["place"] = place
    assert dist.is_initialized()
    for check in (
        check_dtypes,
        check_order,
        check_gradients,
        check_batches,
        check_data,
        check_checkpoints,
        check_averages,
        check_refusals,
        check_mismatches,
    ):
        check()
        ours.barrier()
    ours.print("all was tried")
    (FOLDER / f"found{ours.rank()}.json").write_text(json.dumps(FOUND))


if __name__ == "__main__":
    main()
