"""Runs the notebooks of this folder and stores them with their outputs: ``make notebooks``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

# torchdata calls a function of torch that is deprecated, which is no concern of the reader.
_QUIET = "ignore::UserWarning:torchdata.stateful_dataloader.stateful_dataloader"
HERE = Path(__file__).resolve().parent


class ThisPython(AsyncKernelManager):
    """Starts the kernel with this interpreter, whatever kernels the user has installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")


def execute(path: Path) -> None:
    """Runs the notebook at ``path``, in an empty folder, and writes it back without times and versions of this run."""
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            timeout=600,
            kernel_manager_class=ThisPython,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute(env=os.environ | {"PYTHONWARNINGS": _QUIET})
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    nbformat.write(notebook, path)


def main() -> None:
    """Runs those that the arguments name, or all."""
    for path in [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        print(path.name)
        execute(path)


if __name__ == "__main__":
    main()
