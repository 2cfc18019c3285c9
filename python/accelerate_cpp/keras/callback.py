"""What ``model.fit`` does besides when several processes train one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.frameworks import collectives
from accelerate_cpp.frameworks.processes import processes
from accelerate_cpp.keras.backends import assign, value_of
from accelerate_cpp.keras.optimizer import DistributedOptimizer, is_distributed


class AccelerateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Starts all ranks with the same model, and lets all see the same metrics. The first in the list of callbacks.

    At the start of training, every rank gets rank 0's weights and state of the optimizer. At the end of an epoch, the
    metrics of training and validation are averaged over the ranks, so that callbacks that come after it decide alike.
    Only rank 0 shows progress. If a rank is lost, the next step of the others fails and names it.

    Raises:
        InvalidArgument: when training starts, the optimizer is not distributed, or TensorFlow is to compile steps with
            XLA, which calls no collectives.

    Example:
        >>> import keras, numpy as np
        >>> from accelerate_cpp.keras import AccelerateCallback, DistributedOptimizer
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile(DistributedOptimizer(keras.optimizers.SGD()), "mse")
        >>> x, y = np.ones((4, 2)), np.ones((4, 1))
        >>> len(model.fit(x, y, verbose=0, callbacks=[AccelerateCallback()]).history["loss"])
        1
    """

    def set_params(self, params: dict[str, Any]) -> None:
        """Takes the arguments of ``fit``; those of other ranks say that nothing is printed."""
        super().set_params(params)
        if params and not processes().is_main_process:
            params["verbose"] = 0  # the progress bar, which comes later, reads the same object

    def on_train_begin(self, logs: Any = None) -> None:
        """Gives all ranks the values of rank 0."""
        optimizer = self.model.optimizer
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and is_distributed(optimizer.inner_optimizer):
            optimizer = DistributedOptimizer(optimizer)  # compile() has put the given one into it
        if not is_distributed(optimizer):
            raise InvalidArgument(
                f"the optimizer of the model, {type(optimizer).__name__}, does not average gradients; "
                "compile the model with DistributedOptimizer(optimizer)"
            )
        if keras.backend.backend() == "tensorflow" and self.model.jit_compile:
            raise InvalidArgument(
                "model.compile(jit_compile=True): XLA of TensorFlow cannot call collectives; pass jit_compile=False"
            )
        broadcast_variables([*self.model.weights, *optimizer.variables])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replaces the metrics of this rank by their means, for the callbacks that follow."""
        if logs:
            logs.update(average_metrics(logs))


def average_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The mean over the ranks of each number, such as those of ``model.evaluate(…, return_dict=True)``.

    All ranks pass the same names. For what is a mean over batches of the same size, this is the metric of all data.

    Raises:
        PeerLost, MismatchedCollective, Timeout.

    Example:
        >>> from accelerate_cpp.keras import average_metrics
        >>> average_metrics({"loss": 0.5})
        {'loss': 0.5}
    """
    names = sorted(metrics)
    values = torch.tensor([float(metrics[name]) for name in names], dtype=torch.float64)
    [means] = collectives.all_reduce([values], "mean")
    by_name = dict(zip(names, means.tolist(), strict=True))
    return {name: by_name[name] for name in metrics}


def broadcast_variables(variables: Iterable[Any], root: int = 0) -> None:
    """Gives variables of Keras the values that they have on rank ``root``.

    Args:
        variables: such as ``model.weights``; all ranks pass as many, with the same shapes and dtypes.

    Raises:
        InvalidArgument: ``root`` is no rank.
        PeerLost, MismatchedCollective, Timeout.

    Example:
        >>> import keras
        >>> from accelerate_cpp.keras import broadcast_variables
        >>> broadcast_variables([keras.Variable([1.0, 2.0])])
    """
    targets = list(variables)
    values = collectives.broadcast([value_of(variable) for variable in targets], root)
    for variable, value in zip(targets, values, strict=True):
        assign(variable, value)


def main_process_only(callbacks: Iterable[Any]) -> list[Any]:
    """``callbacks`` on rank 0, and none on the others: for those that write files, such as ``ModelCheckpoint``.

    Example:
        >>> from accelerate_cpp.keras import main_process_only
        >>> main_process_only(["one"])
        ['one']
    """
    return list(callbacks) if processes().is_main_process else []
