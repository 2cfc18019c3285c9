"""TensorFlow among processes: MultiWorkerMirroredStrategy, and ours.

Measured are the mean over the processes of 25 million numbers in 60 tensors, as a graph of ``tf.function`` takes it,
and a step of ``model.fit`` with a perceptron of 5.8 million parameters and 64 random rows per process. "alone" is the
limit of the step: the processes do not communicate. It needs tensorflow-cpu.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from interleaved import run, seconds_of_each, serve
from workers import own_rank

from accelerate_cpp.launch.plan.host_resources import free_port

NAMES = ("MultiWorkerMirroredStrategy", "accelerate_cpp", "alone")
AVERAGE, STEP = "average 25 M numbers", "step of model.fit"
SHAPES = [(500, 768)] * 40 + [(640, 768)] * 19 + [(303_680,)]
STEPS = 10
Averaging = Callable[[list[Any]], list[Any]]


def mirrored() -> tuple[Any, Averaging]:
    """TensorFlow's own strategy over the workers of this run, and how a replica averages."""
    import tensorflow as tf
    import torch.distributed as dist

    size, rank = int(os.environ["WORLD_SIZE"]), own_rank()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0)
    store.set(f"worker {rank}", f"127.0.0.1:{free_port()}")
    workers = [store.get(f"worker {other}").decode() for other in range(size)]
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function  # type: ignore[untyped-decorator]
    def average(tensors: list[Any]) -> list[Any]:
        def replica(mine: list[Any]) -> list[Any]:
            here = [tf.identity(tensor) for tensor in mine]  # the strategy asks tensors for their device
            means: list[Any] = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, here)
            return means

        means: list[Any] = strategy.run(replica, (tensors,))
        return means

    return strategy, average


def ours() -> Averaging:
    """The average of this package."""
    import tensorflow as tf

    from accelerate_cpp.tensorflow import average_gradients

    averaging: Averaging = tf.function(average_gradients)
    return averaging


def perceptron(optimizer: Any) -> Any:
    """Two hidden layers, compiled."""
    import keras

    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(2048, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


def worker(name: str) -> None:
    """One rank of a contestant."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf

    threads = int(os.environ["OMP_NUM_THREADS"])
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    strategy: Any = None
    average: Averaging = lambda tensors: tensors  # noqa: E731
    if name == NAMES[0]:
        strategy, average = mirrored()
    elif name == NAMES[1]:
        average = ours()
    import keras

    tensors = [tf.random.stateless_uniform(shape, (own_rank(), place)) for place, shape in enumerate(SHAPES)]
    size = int(os.environ["WORLD_SIZE"])
    # The strategy takes whole batches, and cuts them.
    rows = 64 * STEPS * (size if strategy is not None else 1)
    images, labels = tf.random.stateless_normal((rows, 784), (0, 1)), tf.zeros((rows,), tf.int32)
    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(rows // STEPS)
    made: list[Any] = []

    def model() -> Any:
        if not made:
            optimizer = keras.optimizers.SGD(1e-3)
            if name == NAMES[1]:
                from accelerate_cpp.keras import DistributedOptimizer

                optimizer = DistributedOptimizer(optimizer)
            made.append(perceptron(optimizer))
        return made[0]

    def measure(measurement: str) -> list[float]:
        if measurement == AVERAGE:
            return seconds_of_each(lambda: average(tensors)[-1].numpy(), 5)
        if strategy is not None:
            with strategy.scope():
                built = model()
        else:
            built = model()
        began = time.perf_counter()
        built.fit(data, verbose=0)
        return [(time.perf_counter() - began) / STEPS]

    serve(measure)


if __name__ == "__main__":
    run(__doc__, worker, [AVERAGE, STEP], NAMES)
