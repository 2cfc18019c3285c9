"""``notebook_launcher`` in the cells of a real Jupyter kernel, with forks of the kernel and with a helper process."""

from __future__ import annotations

import nbformat
import psutil
import pytest

from test_notebooks import patient_client

pytest.importorskip("torch")

CELLS = {
    "imports": """
import os
import torch
from accelerate_cpp import Accelerator, notebook_launcher
os.environ["KERNEL"] = str(os.getpid())""",
    "first use": """
def to_gpu():
    for call, _ in torch.cuda._queued_calls:
        call()
    torch.cuda.is_initialized = lambda: {initialised}
to_gpu()""",
    "failure": """
def inner(value):
    raise ValueError(f"bad {{value}}")
def train(value):
    inner(value)
notebook_launcher(train, (3,), num_processes=2)""",
    "interrupt": """
def wait():
    import os, signal, time
    if os.environ["RANK"] == "1":
        os.kill(int(os.environ["KERNEL"]), signal.SIGINT)
    time.sleep(600)
notebook_launcher(wait, num_processes=2)""",
    "output": """notebook_launcher(lambda: print("hello"), num_processes=2)""",
    "shown": """
from IPython.display import HTML, display
from tqdm.auto import tqdm
import matplotlib.pyplot as plt
def show():
    display(HTML(f"<b>rank {{os.environ['RANK']}}</b>"))
    plt.plot([0, 1])
    plt.show()
    for _ in tqdm(range(3), desc="steps"):
        pass
notebook_launcher(show, num_processes=2)""",
    "values": """
def train():
    return Accelerator(cpu=True).process_index, os.environ["KERNEL"] == str(os.getppid())
notebook_launcher(train, num_processes=2)""",
}


@pytest.fixture(scope="module", params=["forks", "helper"])
def cells(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[nbformat.NotebookNode]]:
    """The outputs of all cells; no process is left."""
    told = {"initialised": request.param == "helper"}
    sources = [source.format(**told) for source in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source.strip()) for source in sources])
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    folder = tmp_path_factory.mktemp("notebook")
    patient_client(notebook, folder, allow_errors=True).execute()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    outputs = {name: list(cell.outputs) for name, cell in zip(CELLS, notebook.cells, strict=True)}
    outputs["kind"] = request.param
    outputs["widgets"] = notebook.metadata.get("widgets", {})
    return outputs


def _error(outputs: list[nbformat.NotebookNode]) -> nbformat.NotebookNode:
    (error,) = (output for output in outputs if output.output_type == "error")
    return error


def test_failure_is_shown_as_the_workers_traceback_with_names_of_cells(
    cells: dict[str, list[nbformat.NotebookNode]],
) -> None:
    first, *others = "\n".join(_error(cells["failure"]).traceback).splitlines()
    assert first in ("rank 0 failed: ValueError: bad 3", "rank 1 failed: ValueError: bad 3")
    assert others == [
        "",
        "Traceback (most recent call last):",
        "  Cell In[3], line 4, in train",
        "    inner(value)",
        "  Cell In[3], line 2, in inner",
        '    raise ValueError(f"bad {value}")',
        "ValueError: bad 3",
    ]


def test_only_the_first_launch_says_why_there_is_a_helper_and_which_call_it_was(
    cells: dict[str, list[nbformat.NotebookNode]],
) -> None:
    said = ["".join(output.get("text", "") for output in cells[name]) for name in ("failure", "interrupt", "output")]
    expected = [cells["kind"] == "helper", False, False]
    assert ["by `call()` (Cell In[2], line 3)" in text for text in said] == expected


def test_interrupt_reaches_the_cell_and_leaves_the_kernel(cells: dict[str, list[nbformat.NotebookNode]]) -> None:
    assert _error(cells["interrupt"]).ename == "KeyboardInterrupt"
    assert "".join(output.text for output in cells["output"]) == "hello\n" * 2


def test_cell_shows_what_the_workers_return(cells: dict[str, list[nbformat.NotebookNode]]) -> None:
    (shown,) = (output.data["text/plain"] for output in cells["values"] if output.output_type == "execute_result")
    is_child = cells["kind"] == "forks"
    assert shown == f"[(0, {is_child}), (1, {is_child})]"


def test_what_rank_0_displays_is_in_the_cell_once_and_no_worker_complains(
    cells: dict[str, list[nbformat.NotebookNode]],
) -> None:
    text = "".join(output.get("text", "") for output in cells["shown"])
    assert "from fork" not in text
    if cells["kind"] == "helper":  # it is no kernel, and shows them as text
        assert "IPython.core.display.HTML" in text
        return
    shown = [output.data for output in cells["shown"] if output.output_type == "display_data"]
    assert [data["text/html"] for data in shown if "text/html" in data] == ["<b>rank 0</b>"]
    assert ["image/png" in data for data in shown].count(True) == 1
    bars = [data for data in shown if "application/vnd.jupyter.widget-view+json" in data]
    assert len(bars) == 1
    states = cells["widgets"]["application/vnd.jupyter.widget-state+json"]["state"].values()
    assert [state["state"]["value"] for state in states if state["model_name"] == "FloatProgressModel"] == [3.0]
