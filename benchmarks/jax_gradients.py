"""The mean over two processes of gradients in JAX: this package against JAX's own collectives over Gloo.

25 million parameters in 60 arrays of float32. JAX's processes are joined by ``jax.distributed``, and a jitted
``shard_map`` with ``lax.pmean`` averages; ours call ``average_gradients``. "in place" gives the gradients away to the
call, as a step does with those that it has computed; "into new memory" keeps them; "step" computes them from the
parameters before, all in one program. "outside" is the call of ours outside of ``jit``, beside JAX's jitted one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from interleaved import run, seconds_of_each, serve

OF_JAX, OURS = "jax.distributed over gloo", "accelerate_cpp.jax"
MEASUREMENTS = ("into new memory", "in place", "step", "outside")
CALLS = 3  # per turn
_MATRICES = [(1024, 1024)] * 22 + [(512, 512)] * 4 + [(1024,)] * 33
SHAPES = [*_MATRICES, (25_000_000 - 22 * 1024 * 1024 - 4 * 512 * 512 - 33 * 1024,)]


def means_of_jax() -> tuple[Callable[[Any], Any], Callable[[tuple[int, ...]], Any], Callable[[], object]]:
    """The mean over the processes of the arrays of a list; an array of a shape; and a barrier."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as Parts

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    mesh = Mesh(np.array(jax.devices()), ("processes",))
    parts = NamedSharding(mesh, Parts("processes"))

    def array(shape: tuple[int, ...]) -> Any:
        """One row on each process."""
        row = np.full((1, *shape), 1.0 + jax.process_index(), np.float32)
        return jax.make_array_from_process_local_data(parts, row, (jax.process_count(), *shape))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=Parts("processes"), out_specs=Parts("processes"))
    def mean(gradients: Any) -> Any:
        return [jax.lax.pmean(gradient, "processes") for gradient in gradients]

    token = array((1,))
    return mean, array, lambda: jax.block_until_ready(mean([token]))


def means_of_ours() -> tuple[Callable[[Any], Any], Callable[[tuple[int, ...]], Any], Callable[[], object]]:
    """The same with this package."""
    import jax.numpy as jnp

    import accelerate_cpp.jax as ours

    return ours.average_gradients, lambda shape: jnp.full(shape, 1.0 + ours.rank(), jnp.float32), ours.barrier


def worker(name: str) -> None:
    """One rank of a contestant."""
    mean, array, meet = means_of_jax() if name == OF_JAX else means_of_ours()
    import jax
    import jax.numpy as jnp

    gradients: list[Any] = [array(shape) for shape in SHAPES]
    kept = jax.jit(mean)
    given = jax.jit(mean, donate_argnums=0)
    step = jax.jit(lambda weights: mean([jnp.sin(weight) for weight in weights]))

    def in_place() -> None:
        nonlocal gradients
        gradients = jax.block_until_ready(given(gradients))

    calls: dict[str, Callable[[], object]] = {
        "into new memory": lambda: jax.block_until_ready(kept(gradients)),
        "in place": in_place,
        "step": lambda: jax.block_until_ready(step(gradients)),
        "outside": lambda: jax.block_until_ready(mean(gradients)),
    }
    averages = [float(jnp.max(average.addressable_data(0))) for average in kept(gradients)[:2]]
    assert averages == [1.5, 1.5], averages

    def measure(measurement: str) -> list[float]:
        meet()
        return seconds_of_each(calls[measurement], CALLS)

    serve(measure)


if __name__ == "__main__":
    run(__doc__, worker, MEASUREMENTS, (OF_JAX, OURS))
