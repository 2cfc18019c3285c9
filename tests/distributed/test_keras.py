"""Keras 3 on two processes: ``model.fit`` with each backend gives what one process gives without this package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from processes import run_processes
from tensorflow_ranks import examples_in_docstrings

# Never imported here: it would stay in the process of all tests, and the backend with it.
pytestmark = pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed")

IS_MISSING = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("torch", "jax", "tensorflow")
}
BACKENDS = [pytest.param(name, marks=is_missing) for name, is_missing in IS_MISSING.items()]
FITTED = [
    pytest.param(name, marks=[is_missing, *[pytest.mark.long] * (name == "jax")])
    for name, is_missing in IS_MISSING.items()
]
EPOCHS = 3
PATIENCE_SECONDS = 600  # compiling with JAX takes two minutes where others use the cores, too


def environment(backend: str) -> dict[str, str]:
    return {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}


def histories(alone: bool) -> dict[str, tuple[list[Any], dict[str, list[float]]]]:
    """By optimizer, the weights after training and the metrics of each epoch: Keras alone, or on a rank's part."""
    import keras

    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(32, 6)).astype(np.float32)
    words = generator.integers(0, 20, (32, 5))
    labels = generator.integers(0, 3, 32)
    rank = 0
    if not alone:
        from accelerate_cpp import keras as ours

        rank = ours.processes().rank
    optimizers = keras.optimizers
    cases = {
        "momentum": optimizers.SGD(0.1, momentum=0.9),
        "clipped": optimizers.Adam(1e-2, global_clipnorm=0.1),
        "accumulated": optimizers.AdamW(1e-2, gradient_accumulation_steps=2, clipnorm=0.05),
        "scaled": optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=2.0**10, dynamic_growth_steps=3),
        "words": optimizers.Adam(1e-2),
    }
    found = {}
    for name, optimizer in cases.items():
        keras.utils.set_random_seed(rank)  # rank 0 starts as Keras alone does
        layers: list[Any] = [keras.Input((6,)), keras.layers.Dense(16, activation="tanh")]
        if name == "words":
            layers = [keras.Input((5,), dtype="int32"), keras.layers.Embedding(20, 8), keras.layers.Flatten()]
        model = keras.Sequential([*layers, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        x = words if name == "words" else inputs
        if alone:
            model.compile(optimizer, loss, metrics=["accuracy"])
            validation = {"validation_data": (x[:16], labels[:16]), "validation_batch_size": 8}
            fitted = model.fit(x, labels, 8, EPOCHS, 0, shuffle=False, **validation)
        else:
            model.compile(ours.DistributedOptimizer(optimizer), loss, metrics=["accuracy"])
            loader = ours.data_loader((x, labels), batch_size=4)
            validation = {"validation_data": ours.data_loader((x[:16], labels[:16]), batch_size=4)}
            callbacks = [ours.AccelerateCallback()]
            fitted = model.fit(loader, epochs=EPOCHS, verbose=0, shuffle=False, callbacks=callbacks, **validation)
        found[name] = (model.get_weights(), fitted.history)
    return found


@pytest.mark.timeout(3 * PATIENCE_SECONDS)
@pytest.mark.parametrize("backend", FITTED)
def test_fit_on_two_processes_is_that_of_keras_on_one(backend: str) -> None:
    (alone,) = run_processes(histories, 1, True, timeout=PATIENCE_SECONDS, environment=environment(backend))
    both = run_processes(histories, 2, False, timeout=PATIENCE_SECONDS, environment=environment(backend))
    for name, (weights, history) in alone.items():
        for found in both:
            assert found[name][1].keys() == history.keys()
            for metric, values in history.items():
                np.testing.assert_allclose(found[name][1][metric], values, rtol=1e-5, atol=1e-6, err_msg=metric)
            for one, other in zip(found[name][0], weights, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=name)


def in_each_rank(folder: str) -> None:
    """What else ``fit`` needs: on rank 1 alone gradients overflow, files are written, or the program errs."""
    import keras

    from accelerate_cpp import keras as ours
    from accelerate_cpp.errors import CheckpointError, InvalidArgument

    place = ours.processes()
    rank, backend = place.rank, keras.backend.backend()

    def model_of(optimizer: Any, **compiled: Any) -> Any:
        keras.utils.set_random_seed(rank)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        model.compile(optimizer, "mse", **compiled)
        return model

    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(16, 3)).astype(np.float32), np.ones((16, 1), np.float32)
    callbacks: list[Any] = [ours.AccelerateCallback()]

    def fit(model: Any, inputs: Any = x) -> Any:
        loader = ours.data_loader((inputs, y), batch_size=4)
        return model.fit(loader, verbose=0, shuffle=False, callbacks=callbacks)

    def weights_of_all(model: Any) -> list[Any]:
        own = [np.array(weight) for weight in model.get_weights()]
        ours.broadcast_variables(model.weights, 1)
        for one, other in zip(own, model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        return own

    # The first batch of rank 1 overflows, so both leave out that step; the second one is taken.
    overflowing = np.array(x)
    overflowing[4] = 3e38
    for wrapped_by_keras in (False, True):
        plain = keras.optimizers.SGD(0.1)
        inner = ours.DistributedOptimizer(plain) if wrapped_by_keras else plain
        scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
        model = model_of(scaled if wrapped_by_keras else ours.DistributedOptimizer(scaled))
        fit(model, overflowing)
        assert int(scaled.iterations) == 1
        assert float(scaled.dynamic_scale) == 2.0
        assert all(np.isfinite(weight).all() for weight in weights_of_all(model))
    # Without the callback nothing has told the outer one, which would decide on each rank alone.
    scaled = keras.optimizers.LossScaleOptimizer(ours.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with pytest.raises(InvalidArgument, match="inside a LossScaleOptimizer"):
        model_of(scaled).fit(x, y, verbose=0)

    with pytest.raises(InvalidArgument, match="SGD, does not average gradients"):
        fit(model_of(keras.optimizers.SGD(0.1)))
    if backend == "tensorflow":
        with pytest.raises(InvalidArgument, match="jit_compile=False"):
            fit(model_of(ours.DistributedOptimizer("sgd"), jit_compile=True))
    with pytest.raises(InvalidArgument, match="expected an optimizer of Keras 3, found int"):
        ours.DistributedOptimizer(3)
    with pytest.raises(InvalidArgument, match="expected batch_size"):
        ours.data_loader((x, y))

    # What rank 0 writes is an ordinary model, and a checkpoint starts both ranks alike.
    model = model_of(ours.DistributedOptimizer(ours.DistributedOptimizer(keras.optimizers.Adam(0.1))))
    file = Path(folder) / f"{backend}.keras"
    written = ours.main_process_only([keras.callbacks.ModelCheckpoint(file)])
    assert len(written) == (rank == 0)
    callbacks.extend(written)
    fit(model)
    trained = weights_of_all(model)
    if rank == 0:
        again = keras.saving.load_model(file)
        assert type(again.optimizer) is type(keras.optimizers.Adam(0.1))
        for one, other in zip(again.get_weights(), trained, strict=True):
            np.testing.assert_array_equal(one, other)
    target = Path(folder) / f"{backend}-checkpoint"
    states = [np.array(keras.ops.convert_to_numpy(variable)) for variable in model.optimizer.variables]
    ours.save_state(target, model)
    other = model_of(ours.DistributedOptimizer(keras.optimizers.Adam(0.5)))
    ours.load_state(target, other)
    for one, expected in zip(other.get_weights(), trained, strict=True):
        np.testing.assert_array_equal(one, expected)
    for variable, expected in zip(other.optimizer.variables, states, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), expected)
    with pytest.raises(CheckpointError, match="not expected 'optimizer/" if rank == 0 else ""):
        ours.load_state(target, model_of(ours.DistributedOptimizer("sgd")))
    with pytest.raises(InvalidArgument, match="not built"):
        ours.save_state(target, keras.Sequential([keras.layers.Dense(1)]))

    assert ours.average_metrics({"loss": float(rank), "a": 1.0}) == {"loss": 0.5, "a": 1.0}


@pytest.mark.timeout(3 * PATIENCE_SECONDS)
@pytest.mark.parametrize("backend", FITTED)
def test_ranks_overflow_save_and_err_together(backend: str, tmp_path: Path) -> None:
    run_processes(in_each_rank, 2, str(tmp_path), timeout=PATIENCE_SECONDS, environment=environment(backend))


def saved_with_an_optimizer_of_the_program(file: str) -> list[str]:
    import keras

    from accelerate_cpp.keras import DistributedOptimizer

    @keras.saving.register_keras_serializable(package="program")
    class Slow(keras.optimizers.SGD):  # type: ignore[misc]
        pass

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(DistributedOptimizer(Slow(0.1)), "mse")
    model.save(file)
    again = keras.saving.load_model(file)
    return [
        keras.saving.get_registered_name(type(one.optimizer)) for one in (model, again) if type(one.optimizer) is Slow
    ]


def test_a_file_names_the_registered_class_of_the_program(tmp_path: Path) -> None:
    file = str(tmp_path / "model.keras")
    found = run_processes(saved_with_an_optimizer_of_the_program, 1, file, environment=environment("torch"))
    assert found == [["program>Slow"]]


def test_examples_of_the_docstrings_run() -> None:
    (wrong,) = run_processes(examples_in_docstrings, 1, ("accelerate_cpp.keras",), environment=environment("torch"))
    assert wrong == []
