"""MLflow."""

from __future__ import annotations

import json
import os
import warnings
from itertools import islice
from typing import Any

from accelerate_cpp.config.env_table import Variable, parse_flag
from accelerate_cpp.trackers import libraries
from accelerate_cpp.trackers.general import LibraryTracker
from accelerate_cpp.trackers.main_process import on_main_process
from accelerate_cpp.trackers.values import as_number, flat, leave_out


def _parse_tags(text: str) -> dict[str, str]:
    try:
        tags = json.loads(text)
    except ValueError as error:
        raise ValueError(f"expected a JSON object ({error})") from None
    if not isinstance(tags, dict):
        raise ValueError("expected a JSON object")
    return tags


EXPERIMENT: Variable[str | None] = Variable("MLFLOW_EXPERIMENT_NAME", str, str, None, "experiment of MLflow")
RUN_ID: Variable[str | None] = Variable("MLFLOW_RUN_ID", str, str, None, "run of MLflow to continue")
TAGS: Variable[dict[str, str] | None] = Variable("MLFLOW_TAGS", _parse_tags, json.dumps, None, "tags of MLflow's run")
NESTED: Variable[bool | None] = Variable("MLFLOW_NESTED_RUN", parse_flag, str, None, "whether the run is in another")


class MLflowTracker(LibraryTracker):
    """Logs to MLflow, at the address in ``MLFLOW_TRACKING_URI`` or given to ``mlflow.set_tracking_uri``.

    Args:
        experiment_name: the experiment, which is created if there is none of that name; ``None`` is MLflow's own
            choice. ``MLFLOW_EXPERIMENT_NAME`` takes precedence over it.
        logging_dir: where a new experiment keeps its artifacts; ``None`` leaves that to MLflow.
        run_id: a run to continue; ``MLFLOW_RUN_ID`` takes precedence over it.
        tags: of the run and of a new experiment, as a dictionary of texts or its JSON; ``MLFLOW_TAGS`` takes precedence
            over it.
        nested_run: begin the run inside the active one; ``MLFLOW_NESTED_RUN`` takes precedence over it.
        run_name: the name of a new run.
        description: of the run.

    Attributes:
        active_run: the ``mlflow.ActiveRun``; ``None`` before :meth:`start`.

    Raises:
        InvalidArgument: one of the variables cannot be read.
    """

    name = "mlflow"
    requires_logging_directory = False

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        nested = NESTED.get()
        self.experiment_name = EXPERIMENT.get() or experiment_name
        self.logging_dir, self.run_id = logging_dir, RUN_ID.get() or run_id
        self.tags = TAGS.get() or (_parse_tags(tags) if isinstance(tags, str) else tags)
        self.nested_run = nested_run if nested is None else nested
        self.run_name, self.description = run_name, description
        self.active_run: Any = None

    @property
    def tracker(self) -> Any:
        """The ``mlflow.ActiveRun``."""
        return self.active_run

    @on_main_process
    def start(self) -> None:
        """Begins or continues the run.

        Raises:
            MissingLibrary: MLflow is not installed.
        """
        self.active_run = libraries.load(self.name).start_run(
            run_id=self.run_id,
            experiment_id=self._experiment_id(),
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Stores ``values`` as parameters of the run.

        MLflow keeps their texts; those that are longer than it allows are left out with a warning.
        """
        self._opened()
        limits = libraries.load(self.name, "utils.validation")
        fitting = {}
        for name, value in values.items():
            if len(str(value)) > limits.MAX_PARAM_VAL_LENGTH:
                warnings.warn(
                    f"mlflow leaves out the parameter {name!r}: its text has {len(str(value))} characters, and MLflow "
                    f"keeps at most {limits.MAX_PARAM_VAL_LENGTH}; store it as an artifact",
                    stacklevel=5,  # the script, through Accelerator.init_trackers
                )
            else:
                fitting[name] = value
        rest = iter(fitting.items())
        while batch := dict(islice(rest, limits.MAX_PARAMS_TAGS_PER_BATCH)):
            libraries.load(self.name).log_params(batch)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs ``values`` as metrics.

        Args:
            values: numbers, and dictionaries of numbers (as ``name/inner``). What is not a number is skipped with a
                warning.
            step: of all values; MLflow takes ``None`` for 0.
            kwargs: options of ``mlflow.log_metrics``.
        """
        self._opened()
        metrics: dict[str, int | float] = {}
        for name, value in flat(values):
            number = as_number(value)
            if number is None:
                leave_out(self.name, name, value, "numbers and dictionaries of numbers")
            else:
                metrics[name] = number
        libraries.load(self.name).log_metrics(metrics, step=step, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Stores a figure of matplotlib or plotly.

        Args:
            figure: the figure.
            artifact_file: the file below the run's artifacts, for example ``"plots/loss.png"``.
            save_kwargs: options of the figure's own function for saving.
        """
        self._opened()
        options = {**save_kwargs.pop("save_kwargs", {}), **save_kwargs}
        given = {"save_kwargs": options} if options else {}
        libraries.load(self.name).log_figure(figure=figure, artifact_file=artifact_file, **given)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Stores all files of the folder ``local_dir`` in ``artifact_path`` below the run's artifacts."""
        self._opened()
        libraries.load(self.name).log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Stores the file ``local_path`` in the folder ``artifact_path`` below the run's artifacts."""
        self._opened()
        libraries.load(self.name).log_artifact(local_path=local_path, artifact_path=artifact_path)

    @on_main_process
    def finish(self) -> None:
        """Ends the run."""
        self._opened()
        libraries.load(self.name).end_run()

    def _experiment_id(self) -> str | None:
        mlflow = libraries.load(self.name)
        if self.experiment_name is None:
            return None
        found = mlflow.get_experiment_by_name(self.experiment_name)
        if found is not None:
            return str(found.experiment_id)
        place = None if self.logging_dir is None else os.fspath(self.logging_dir)
        made = mlflow.create_experiment(name=self.experiment_name, artifact_location=place, tags=self.tags)
        return str(made)
