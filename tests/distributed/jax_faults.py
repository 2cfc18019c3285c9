"""A loop of collectives in JAX in which rank 1 comes to an end: ``python jax_faults.py MANNER PLACE``.

MANNER is ``killed`` or ``raised``; PLACE is ``inside`` or ``outside`` of ``jit``.
"""

from __future__ import annotations

import os
import signal
import sys

import jax
import jax.numpy as jnp

import accelerate_cpp.jax as ours


def main(manner: str, place: str) -> None:
    """Never returns: rank 1 ends in the fourth step, and rank 0 waits for it there."""
    average = jax.jit(lambda x: ours.all_reduce(jnp.sin(x), "mean")) if place == "inside" else ours.average_gradients
    x = jnp.ones(1000)
    for number in range(1000):
        if number == 3 and ours.rank() == 1:
            if manner == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no more data")
        x = jax.block_until_ready(average(x))


if __name__ == "__main__":
    main(*sys.argv[1:])
