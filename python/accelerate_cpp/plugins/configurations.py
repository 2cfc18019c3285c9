"""Options of an ``Accelerator``: gradient accumulation, compilation, loaders, and the folders of a project."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from accelerate_cpp.config.compile import DYNAMO_DEFAULTS, compile_dynamo, compile_dynamo_field
from accelerate_cpp.config.session_config import DynamoConfig
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.enums import DynamoBackend
from accelerate_cpp.plugins.handlers import KwargsHandler


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How micro-batches become optimizer steps.

    Attributes:
        num_steps: micro-batches per optimizer step.
        adjust_scheduler: whether the scheduler's count of steps follows the micro-batches.
        sync_with_dataloader: step on a loader's last batch, regardless of the count.
        sync_each_batch: reduce gradients in every backward pass, which needs less memory and more communication.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """How ``torch.compile`` compiles models while they are prepared. Fields may be changed until then.

    Attributes:
        backend: a :class:`DynamoBackend` or its name in upper or lower case; ``NO`` compiles nothing. ``None`` uses
            ``ACCELERATE_DYNAMO_BACKEND``, and other fields that are ``None`` use their variables.
        mode: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"`` or another mode of the backend.
        fullgraph: raise an error if the graph breaks.
        dynamic: compile for changing shapes; with ``None``, the compiler finds out which change.
        options: options of the backend, instead of a mode.
        disable: compile nothing, for tests.
        use_regional_compilation: if all blocks of a ``ModuleList`` have the same class, compile them one by one; equal
            blocks share one compilation. A model without such blocks is compiled as a whole.

    Raises:
        ValueError: there is no backend of that name.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        for name in DYNAMO_DEFAULTS:
            value, found = compile_dynamo_field(name, getattr(self, name))
            setattr(self, name, _dynamo_backend(value, found) if name == "backend" else value)

    def to_dict(self) -> dict[str, Any]:
        """A deep copy of all fields, the backend in lower case, as ``torch.compile`` knows it."""
        fields = super().to_dict()
        return {**fields, "backend": str(_dynamo_backend(fields["backend"], "TorchDynamoPlugin.backend")).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Arguments of ``torch.compile``: the fields that differ from their defaults, whatever the variables say."""
        options = super().to_kwargs()
        options.pop("use_regional_compilation", None)
        return options

    def _defaults(self) -> dict[str, Any]:
        return {**DYNAMO_DEFAULTS, "options": None, "disable": False}

    def dynamo_config(self) -> DynamoConfig | None:
        """The current arguments of the compiler; ``None`` if models are not compiled.

        Raises:
            ValueError: both a mode and options are given.
        """
        return compile_dynamo(self.to_kwargs(), by_region=bool(self.use_regional_compilation))


def _dynamo_backend(value: Any, found: str) -> DynamoBackend:
    """The backend that ``value`` names; ``found`` is what the caller wrote."""
    name = str(value).upper()
    if name not in DynamoBackend.list():
        known = ", ".join(DynamoBackend.list())
        raise InvalidArgument(f"{found}: no such backend of torch.compile; expected one of {known}, in any case")
    return DynamoBackend(name)


@dataclass
class DataLoaderConfiguration:
    """How prepared data loaders divide their data among the processes.

    Attributes:
        split_batches: each batch of the loader is cut into one slice per process, instead of separate batches for each
            process.
        dispatch_batches: rank 0 reads and sends every other rank its part; ``None``: for iterable datasets only.
        even_batches: repeat samples so that every process gets equally many batches.
        use_seedable_sampler: shuffle depending only on ``data_seed`` plus the epoch, as torch does with such a seed.
            The order takes 4 bytes per sample; that of ``"computed"`` takes no memory, for data of any length.
        data_seed: the seed of that shuffle; ``None`` uses torch's.
        non_blocking: copy batches to the device without waiting.
        use_stateful_dataloader: loaders have ``state_dict`` and ``load_state_dict``, and continue inside an epoch.
            If torchdata is installed, they are its ``StatefulDataLoader``.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool | str = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class ProjectConfiguration:
    """Where a project keeps its files.

    Attributes:
        project_dir: the folder of the project.
        logging_dir: the folder for logs; ``project_dir`` when ``None``.
        automatic_checkpoint_naming: number checkpoints.
        total_limit: how many numbered checkpoints are kept; ``None`` keeps all.
        iteration: the number of the next checkpoint.
        save_on_each_node: save once per machine instead of once per run.
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Sets ``project_dir``, and also ``logging_dir`` if it was not set."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


def chosen_dynamo_plugin(
    plugin: TorchDynamoPlugin | None, backend: DynamoBackend | str | None
) -> TorchDynamoPlugin | None:
    """The plugin, or one for ``backend``; ``InvalidArgument`` if both are given, or ``plugin`` is not a plugin."""
    if plugin is not None and backend is not None:
        raise InvalidArgument("dynamo_plugin and dynamo_backend were both passed; pass only one of them")
    if plugin is not None and not isinstance(plugin, TorchDynamoPlugin):
        raise InvalidArgument(f"dynamo_plugin={plugin!r}: expected a TorchDynamoPlugin")
    return plugin if backend is None else TorchDynamoPlugin(backend=backend)
