"""TensorFlow among processes: MultiWorkerMirroredStrategy, and ours.

Measured are the mean over the processes of 25 million numbers in 60 tensors, as a graph of ``tf.function`` takes it,
and a step of a Keras model in a graph: a perceptron of 5.8 million parameters and 64 random rows per process. The loop
is not that of ``model.fit``, which in Keras 3 fails on the batches of that strategy. "alone" is the limit of the step:
the processes do not communicate. It needs tensorflow-cpu.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from interleaved import run, seconds_of_each, serve
from workers import own_rank

from accelerate_cpp.launch.plan.host_resources import free_port

NAMES = ("MultiWorkerMirroredStrategy", "accelerate_cpp", "alone")
AVERAGE, STEP = "average 25 M numbers", "step of a Keras model"
SHAPES = [(500, 768)] * 40 + [(640, 768)] * 19 + [(303_680,)]
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


def step_of(optimizer: Any, strategy: Any) -> Callable[[], Any]:
    """A step of a perceptron with two hidden layers, always with the same batch."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(2048, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    images, labels = tf.random.stateless_normal((64, 784), (0, own_rank())), tf.zeros((64,), tf.int32)

    def replica() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    step: Callable[[], Any] = tf.function(replica if strategy is None else lambda: strategy.run(replica))
    return step


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
    steps: list[Callable[[], Any]] = []

    def step() -> Callable[[], Any]:
        if not steps:
            optimizer = keras.optimizers.SGD(1e-3)
            if name == NAMES[1]:
                from accelerate_cpp.keras import DistributedOptimizer

                optimizer = DistributedOptimizer(optimizer)
            steps.append(step_of(optimizer, strategy))
        return steps[0]

    def measure(measurement: str) -> list[float]:
        if measurement == AVERAGE:
            return seconds_of_each(lambda: average(tensors)[-1].numpy(), 5)
        if strategy is None:
            call = step()
        else:
            with strategy.scope():
                call = step()
        return seconds_of_each(lambda: call().numpy(), 5)

    serve(measure)


if __name__ == "__main__":
    run(__doc__, worker, [AVERAGE, STEP], NAMES)
