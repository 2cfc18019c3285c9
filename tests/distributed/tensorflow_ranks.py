"""What ranks do in the tests of TensorFlow: each function runs in processes of its own, which import the library."""

from __future__ import annotations

import collections
import contextlib
import doctest
import io
import itertools
import os
import re
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
STEPS = 6


def each_part(folder: str) -> dict[str, Any]:
    """All checks that need two ranks, by name: ``None``, or the text of what went wrong."""
    import traceback

    checks: list[Callable[[Path], None]] = [
        collectives_give_what_those_of_torch_give,
        gradients_are_those_of_the_functional_collectives_of_torch,
        collectives_of_a_graph_keep_the_order_of_the_program,
        collectives_in_loops_and_branches_of_a_graph,
        errors_have_the_types_of_this_package,
        nests_and_dtypes_survive,
        gradients_are_averaged_with_slices_and_nothing,
        a_gradient_that_one_rank_lacks,
        memory_is_shared_and_inputs_stay_as_they_are,
        batches_of_arrays,
        datasets_are_sharded,
        checkpoints_come_back,
        variables_are_those_of_rank_0,
    ]
    found: dict[str, Any] = {}
    for check in checks:
        try:
            check(Path(folder))
            found[check.__name__] = None
        except Exception:
            found[check.__name__] = traceback.format_exc()
    return found


def same(found: Any, expected: Any) -> None:
    import numpy as np

    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-6, atol=1e-7)


def both(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """``function`` as it is, and as a graph."""
    import tensorflow as tf

    return [function, tf.function(function)]


def collectives_give_what_those_of_torch_give(_: Path) -> None:
    import tensorflow as tf
    import torch
    import torch.distributed as dist

    from accelerate_cpp import tensorflow as ours

    rank, size = ours.rank(), ours.world_size()
    assert (rank, size) == (dist.get_rank(), dist.get_world_size())
    assert ours.is_main_process() == (rank == 0)
    mine = torch.arange(1.0, 9.0).reshape(4, 2) * (rank + 1)
    value = tf.constant(mine.numpy())
    reductions = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    for op, reduction in {**reductions, "product": dist.ReduceOp.PRODUCT, "mean": dist.ReduceOp.AVG}.items():
        whole = mine.clone()
        dist.all_reduce(whole, reduction)
        for call in both(lambda x, op=op: ours.all_reduce(x, op)):
            same(call(value), whole)
        part = torch.empty(4 // size, 2)
        dist.reduce_scatter_tensor(part, mine, reduction)
        for call in both(lambda x, op=op: ours.reduce_scatter(x, op)):
            same(call(value), part)
    gathered = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine)
    of_last = mine.clone()
    dist.broadcast(of_last, size - 1)
    for call in both(ours.all_gather):
        same(call(value), torch.stack(gathered))
    for call in both(lambda x: ours.broadcast(x, size - 1)):
        same(call(value), of_last)
    for call in both(ours.barrier):
        call()


def gradients_are_those_of_the_functional_collectives_of_torch(_: Path) -> None:
    import tensorflow as tf
    import torch
    import torch.distributed as dist
    from torch.distributed.nn import functional

    from accelerate_cpp import tensorflow as ours

    rank, size = ours.rank(), ours.world_size()
    generator = torch.Generator().manual_seed(rank)
    mine = torch.randn(4, 3, generator=generator)

    def scattered(x: torch.Tensor, reduction: Any) -> torch.Tensor:
        return functional.reduce_scatter(torch.empty(4 // size, 3), list(x.chunk(size)), reduction)

    def gradient_of(our: Callable[..., Any], weights: Any) -> Callable[[Any], Any]:
        def gradient(value: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(value)
                output = our(value)
                loss = tf.reduce_sum(output * output * weights)
            return tape.gradient(loss, value)

        return gradient

    pairs: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "sum": (ours.all_reduce, functional.all_reduce),
        "mean": (lambda x: ours.all_reduce(x, "mean"), lambda x: functional.all_reduce(x, dist.ReduceOp.AVG)),
        "gather": (ours.all_gather, lambda x: torch.stack(functional.all_gather(x))),
        "from 0": (ours.broadcast, lambda x: functional.broadcast(x, 0)),
        "from 1": (lambda x: ours.broadcast(x, 1), lambda x: functional.broadcast(x, 1)),
        "scatter": (ours.reduce_scatter, lambda x: scattered(x, dist.ReduceOp.SUM)),
    }
    for name, (our, theirs) in pairs.items():
        x = mine.clone().requires_grad_()
        result = theirs(x * 1.0)
        weights = torch.randn(result.shape, generator=generator)
        (result * result * weights).sum().backward()

        assert x.grad is not None
        for call in both(gradient_of(our, weights.numpy())):
            try:
                same(call(tf.constant(mine.numpy())), x.grad)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
    # torch's reduce_scatter differentiates a mean like a sum; a mean is a sum divided.
    with tf.GradientTape(persistent=True) as tape:
        value = tf.constant(mine.numpy())
        tape.watch(value)
        mean, total = ours.reduce_scatter(value, "mean"), ours.reduce_scatter(value) / size
    same(tape.gradient(mean, value), tape.gradient(total, value))


def collectives_of_a_graph_keep_the_order_of_the_program(_: Path) -> None:
    """Though what they need is ready in another order on each rank."""
    import tensorflow as tf

    from accelerate_cpp import tensorflow as ours

    rank = ours.rank()
    number, slow = 24, tf.random.stateless_normal((300, 300), (1, 2)) / 30

    @tf.function  # type: ignore[untyped-decorator]
    def graph(x: Any) -> list[Any]:
        results = []
        for place in range(number):
            value = x * float(place)
            if place % 2 == rank % 2:
                late = slow
                for _ in range(8):
                    late = tf.tanh(late @ slow)
                value += 0.0 * tf.reduce_sum(late)
            kinds = (ours.all_reduce, ours.broadcast, lambda y: ours.all_gather(y)[1])
            results.append(kinds[place % 3](value))
        return results

    for _ in range(3):
        for place, result in enumerate(graph(tf.constant([1.0, 2.0]) * float(rank + 1))):
            same(result, [[3.0 * place, 6.0 * place], [place, 2.0 * place], [2.0 * place, 4.0 * place]][place % 3])


def collectives_in_loops_and_branches_of_a_graph(_: Path) -> None:
    import tensorflow as tf

    from accelerate_cpp import tensorflow as ours

    rank = ours.rank()

    @tf.function  # type: ignore[untyped-decorator]
    def graph(x: Any, times: Any) -> Any:
        results = tf.TensorArray(tf.float32, times)
        for place in tf.range(times):
            value = x * tf.cast(place, tf.float32)
            if place % 3 == 0:
                results = results.write(place, ours.all_reduce(value))
            else:
                results = results.write(place, ours.broadcast(value, 1))
        return results.stack()

    found = graph(tf.constant([1.0]) * float(rank + 1), tf.constant(40)).numpy()
    same(found[:, 0], [(3.0 if place % 3 == 0 else 2.0) * place for place in range(40)])

    @tf.function  # type: ignore[untyped-decorator]
    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = x
            for _ in tf.range(3):
                value = ours.all_reduce(value * value)
            loss = value * float(rank + 1)
        return tape.gradient(loss, x)

    # With x = 1 on both: s1 = 2, s2 = 8, s3 = 128, and the sum of the losses is 3 s3 = 3·2·(2·(2·x²)²)².
    same(gradient(tf.constant(1.0)), 3 * 128 * 8 / 2)


def errors_have_the_types_of_this_package(_: Path) -> None:
    import pytest
    import tensorflow as tf

    from accelerate_cpp import tensorflow as ours
    from accelerate_cpp.errors import InvalidArgument, MismatchedCollective

    rank = ours.rank()
    with pytest.raises(InvalidArgument, match="op='median': expected 'sum'"):
        ours.all_reduce(tf.constant(1.0), "median")
    with pytest.raises(InvalidArgument, match="mean"):
        ours.all_reduce(tf.constant(1), "mean")
    with pytest.raises(InvalidArgument, match="root=2: expected a rank from 0 to 1"):
        ours.broadcast(tf.constant(1.0), 2)
    for exchange in (ours.all_reduce, ours.gather_for_metrics):
        for call in both(exchange):
            with pytest.raises(InvalidArgument, match="dtype string: expected numbers"):
                call(tf.constant(["text"]))
    for call in both(ours.reduce_scatter):
        with pytest.raises(InvalidArgument, match="multiple of the number of processes"):
            call(tf.constant([1.0, 2.0, 3.0]))
    with tf.GradientTape() as tape:
        x = tf.constant(1.0)
        tape.watch(x)
        y = ours.all_reduce(x, "max")
    with pytest.raises(InvalidArgument, match="has no gradient"):
        tape.gradient(y, x)
    with pytest.raises(MismatchedCollective, match=r"\[2\] float32"):
        ours.all_reduce(tf.zeros(2 + rank))
    in_graph = tf.function(lambda x: ours.all_reduce(x) + 1.0)
    with pytest.raises(tf.errors.OpError, match=r"MismatchedCollective(.|\n)*tensorflow_ranks\.py:\d+"):
        in_graph(tf.zeros(2 + rank))
    same(in_graph(tf.zeros(2)), [1.0, 1.0])  # the group goes on


def nests_and_dtypes_survive(_: Path) -> None:
    import tensorflow as tf

    from accelerate_cpp import tensorflow as ours

    rank = ours.rank()
    for dtype in (tf.bfloat16, tf.float16, tf.float64, tf.int32, tf.int64, tf.uint8):
        for call in both(ours.all_reduce):
            total = call(tf.cast([1, 2, 3], dtype) * tf.cast(rank + 1, dtype))
            assert total.dtype == dtype
            same(tf.cast(total, tf.float32), [3.0, 6.0, 9.0])
    nest = {"a": (tf.constant(rank), [tf.ones((2, 3)) * rank]), "b": tf.zeros((0, 2))}
    for call in both(ours.all_gather):
        found = call(nest)
        same(found["a"][0], [0, 1])
        assert found["a"][1][0].shape == (2, 2, 3)
        assert found["b"].shape == (2, 0, 2)


def gradients_are_averaged_with_slices_and_nothing(_: Path) -> None:
    import tensorflow as tf

    from accelerate_cpp import tensorflow as ours

    rank = ours.rank()
    table, weight, unused = tf.Variable(tf.ones((5, 2))), tf.Variable([1.0, 2.0]), tf.Variable(0.0)
    rows = [[0, 0, 3], [4]][rank]  # ranks look up different numbers of rows

    def averaged() -> Any:
        with ours.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(tf.gather(table, rows)) * (rank + 1.0) + tf.reduce_sum(weight) * (rank + 1.0)
        return tape.gradient(loss, {"table": table, "rest": [weight, unused]})

    for call in both(averaged):
        found = call()
        assert isinstance(found["table"], tf.IndexedSlices)
        same(tf.convert_to_tensor(found["table"]), [[1, 1], [0, 0], [0, 0], [0.5, 0.5], [1, 1]])
        same(found["rest"][0], [1.5, 1.5])
        assert found["rest"][1] is None


def a_gradient_that_one_rank_lacks(_: Path) -> None:
    import pytest
    import tensorflow as tf

    from accelerate_cpp import tensorflow as ours
    from accelerate_cpp.errors import InvalidArgument

    rank = ours.rank()
    weight, sometimes = tf.Variable(2.0), tf.Variable([1.0, 2.0])
    with ours.DistributedGradientTape() as tape:
        loss = weight * weight + (tf.reduce_sum(sometimes) if rank == 1 else 0.0)
    gradients = tape.gradient(loss, [weight, sometimes])
    same(gradients[0], 4.0)
    same(gradients[1], [0.5, 0.5])
    given = [tf.constant(1.0) if rank == 1 else None]
    with pytest.raises(InvalidArgument, match="missing on rank 0 and given on another"):
        ours.average_gradients(given)
    with pytest.raises(tf.errors.OpError, match="missing on rank 0 and given on another"):
        tf.function(ours.average_gradients)(given)


def memory_is_shared_and_inputs_stay_as_they_are(_: Path) -> None:
    import numpy as np
    import tensorflow as tf
    import torch

    from accelerate_cpp import tensorflow as ours
    from accelerate_cpp.tensorflow.memory import to_tensorflow, to_torch

    tensor = tf.random.normal((1000,))
    before = tensor.numpy()
    view = to_torch(tensor)
    assert view.data_ptr() == np.asarray(memoryview(tensor)).__array_interface__["data"][0]
    assert np.asarray(memoryview(to_tensorflow(view))).__array_interface__["data"][0] == view.data_ptr()
    odd = torch.arange(9.0)[1:]  # TensorFlow's kernels would end the process on it
    assert np.asarray(memoryview(to_tensorflow(odd))).__array_interface__["data"][0] % 64 == 0
    ours.all_reduce(tensor)
    ours.average_gradients([tensor])
    same(tensor, before)


def batches_of_arrays(_: Path) -> None:
    import numpy as np

    from accelerate_cpp import tensorflow as ours

    rank = ours.rank()
    images, labels = np.arange(44, dtype=np.float32).reshape(11, 4), np.arange(11)
    loader = ours.data_loader({"x": images, "y": labels}, batch_size=2)
    assert len(loader) == 3
    seen = []
    for batch in loader:
        assert batch["x"].shape == (2, 4)
        same(batch["x"][:, 0], batch["y"] * 4)
        seen.append(ours.gather_for_metrics(batch["y"]).numpy())
        if not loader.is_last:
            start = 4 * (len(seen) - 1) + 2 * rank
            same(batch["y"], [start, start + 1])
            shared = np.shares_memory(images, np.asarray(memoryview(batch["x"])))
            assert shared == (images[start:].ctypes.data % 64 == 0), "as it lies, where TensorFlow can use that"
    same(np.concatenate(seen), labels)
    shuffled = ours.data_loader((images, labels), batch_size=2, shuffle=True, seed=3)
    passes = [[label for _, y in shuffled for label in ours.all_gather(y).numpy().ravel()[:4]] for _ in range(2)]
    assert passes[0] != passes[1]
    assert all(set(labels) <= set(one) for one in passes)


def datasets_are_sharded(_: Path) -> None:
    import pytest
    import tensorflow as tf

    from accelerate_cpp import tensorflow as ours
    from accelerate_cpp.errors import InvalidArgument

    rank = ours.rank()
    whole = tf.data.Dataset.range(10).shuffle(10, seed=1)
    alone = [set(batch.numpy()) for batch in tf.data.Dataset.range(10).shuffle(10, seed=1).batch(4)]
    steps = [ours.all_gather(batch).numpy() for batch in ours.shard_dataset(whole, 2)]
    assert [step.shape for step in steps] == [(2, 2)] * 3
    assert [set(step.ravel()) for step in steps][:2] == alone[:2]
    assert set().union(*(set(step.ravel()) for step in steps)) == set(range(10))
    assert len(list(ours.shard_dataset(whole, 2, drop_remainder=True))) == 2
    unknown = tf.data.Dataset.range(20).filter(lambda x: x % 2 == 0).map(lambda x: (x, -x))
    with pytest.raises(InvalidArgument, match="drop_remainder=True"):
        ours.shard_dataset(unknown, 2)
    found = [(x.numpy().tolist(), y.numpy().tolist()) for x, y in ours.shard_dataset(unknown, 2, drop_remainder=True)]
    mine = [[0, 4], [8, 12]] if rank == 0 else [[2, 6], [10, 14]]
    assert found == [(x, [-one for one in x]) for x in mine]
    named = collections.namedtuple("Named", "x y")
    for wrap in (lambda x: {"x": x}, lambda x: (x,), lambda x: named(x, -x)):
        wrapped = tf.data.Dataset.range(8).map(wrap)
        expected = ours.shard_dataset(wrapped, 2).element_spec
        assert ours.shard_dataset(wrapped.filter(lambda *_: True), 2, drop_remainder=True).element_spec == expected
    with pytest.raises(InvalidArgument, match="batch_size=0"):
        ours.shard_dataset(whole, 0)


def checkpoints_come_back(folder: Path) -> None:
    import pytest
    import tensorflow as tf

    from accelerate_cpp import tensorflow as ours
    from accelerate_cpp.errors import CheckpointError

    rank = ours.rank()
    target = folder / "checkpoint"
    values = {"weight": tf.constant([[1.5, 2.0]], tf.bfloat16), "step": tf.constant(7, tf.int64)}
    variables = {name: tf.Variable(value) for name, value in values.items()}
    if rank == 1:
        variables["step"].assign(-1)
    ours.save_state(target, variables)
    for variable in variables.values():
        variable.assign(tf.zeros_like(variable))
    ours.load_state(target, variables)
    for name, value in values.items():
        same(tf.cast(variables[name], tf.float32), tf.cast(value, tf.float32))
    with pytest.raises(CheckpointError, match="missing 'other'" if rank == 0 else ""):
        ours.load_state(target, {**variables, "other": tf.Variable(0.0)})
    with pytest.raises(CheckpointError, match="'step' has shape" if rank == 0 else ""):
        ours.load_state(target, {**variables, "step": tf.Variable([7])})


def variables_are_those_of_rank_0(_: Path) -> None:
    import tensorflow as tf

    from accelerate_cpp import tensorflow as ours

    rank = ours.rank()
    variables = [tf.Variable([1.0 + rank, 2.0]), tf.Variable(rank)]
    ours.broadcast_variables(variables)
    same(variables[0], [1.0, 2.0])
    same(variables[1], 0)
    ours.broadcast_variables([variables[1].assign(rank)], 1)


def trained(alone: bool) -> list[Any]:
    """The weights after some steps: this package's on a rank's part, or TensorFlow alone on whole batches."""
    import numpy as np
    import tensorflow as tf

    generator = np.random.default_rng(0)
    images = generator.normal(size=(8 * STEPS, 6)).astype(np.float32)
    targets = generator.normal(size=(8 * STEPS, 2)).astype(np.float32)
    seed = 0
    if not alone:
        from accelerate_cpp import tensorflow as ours

        seed = ours.rank()
    weights = [
        tf.Variable(tf.random.stateless_normal(shape, (seed, place)))
        for place, shape in enumerate([(6, 16), (16,), (16, 2)])
    ]
    momenta = [tf.Variable(tf.zeros_like(weight)) for weight in weights]
    if alone:
        batches = tf.data.Dataset.from_tensor_slices((images, targets)).batch(8)
    else:
        ours.broadcast_variables(weights)
        batches = ours.data_loader((images, targets), batch_size=4)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(x @ weights[0] + weights[1]) @ weights[2] - y) ** 2)
        if not alone:
            tape = ours.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, weights)
        for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
            momentum.assign(0.9 * momentum + gradient)
            weight.assign_sub(0.1 * momentum)
        return loss

    for x, y in batches:
        step(x, y)
    return [weight.numpy() for weight in weights]


def examples_in_docstrings(modules: tuple[str, ...]) -> list[str]:
    """Runs the example of each public function; those without one, or whose example prints something else."""
    import inspect

    wrong = []
    for name in modules:
        module = import_module(name)
        for public in module.__all__:
            value = getattr(module, public)
            if not callable(value) or public == "Processes":
                continue
            example = (inspect.getdoc(value) or "").partition("\nExample:\n")[2]
            names: dict[str, Any] = {}
            if "tensorflow" in name:
                names["tf"] = import_module("tensorflow")
            report: list[str] = []
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                test = doctest.DocTestParser().get_doctest(example, names, f"{name}.{public}", None, 0)
                result = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
                os.chdir("/")
            if public == "processes":
                continue  # of the room that frameworks share
            if result.attempted < 2 or result.failed:
                wrong.append(f"{name}.{public}: " + "".join(report))
    return wrong


def wrong_blocks(page: str) -> list[str]:
    """Runs the Python of a page, whose blocks share a namespace; those that print something else than it shows."""
    wrong, names = [], {"__name__": "page"}
    boxes = re.findall(r"^```(\w+)\n(.*?)^```", Path(page).read_text(), re.DOTALL | re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for (language, text), (following, shown) in itertools.pairwise([*boxes, ("", "")]):
            if language == "python":
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(compile(text, page, "exec"), names)
                if printed.getvalue() != (shown if following == "text" else ""):
                    wrong.append(f"{text}prints\n{printed.getvalue()}")
        os.chdir("/")
    return wrong
