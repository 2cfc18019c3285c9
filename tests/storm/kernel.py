"""Runs a cell in a real Jupyter kernel, prints what it prints, and ends with 1 and the error if the cell fails."""

from __future__ import annotations

import sys
from typing import Any

import nbformat
from execute import ThisPython
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode


class Client(NotebookClient):
    """Prints what a cell prints as it comes."""

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> NotebookNode | None:
        """Takes a message of the kernel, and keeps it as output of the cell."""
        if msg["msg_type"] == "stream":
            content = msg["content"]
            print(content["text"], end="", file=sys.stdout if content["name"] == "stdout" else sys.stderr, flush=True)
        if msg["msg_type"] == "error":
            print("\n".join(msg["content"]["traceback"]), file=sys.stderr, flush=True)
        kept: NotebookNode | None = super().process_message(msg, cell, cell_index)
        return kept


def main(source: str) -> int:
    """Runs ``source``, and returns the exit code."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    client = Client(notebook, timeout=None, kernel_manager_class=ThisPython)
    try:
        client.execute()
    except CellExecutionError:
        return 1  # it has been printed
    except DeadKernelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
