"""Runs a cell in a real Jupyter kernel, prints what it prints, and ends with 1 and the error if the cell fails."""

from __future__ import annotations

import sys

import nbformat
from execute import ThisPython
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError


def show(cell: nbformat.NotebookNode) -> None:
    """Prints the outputs of a cell."""
    for output in cell.get("outputs", ()):
        if output.output_type == "stream":
            print(output.text, end="", file=sys.stdout if output.name == "stdout" else sys.stderr)


def main(source: str) -> int:
    """Runs ``source``, and returns the exit code."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    client = NotebookClient(notebook, timeout=None, kernel_manager_class=ThisPython)
    try:
        client.execute()
    except (CellExecutionError, DeadKernelError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        show(notebook.cells[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
