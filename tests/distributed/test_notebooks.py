"""The notebooks run in a real Jupyter kernel, as a user runs them."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import psutil
import pytest
from execute import ThisPython
from nbclient import NotebookClient

from launched import without_news

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


def patient_client(notebook: nbformat.NotebookNode, folder: Path, **options: object) -> NotebookClient:
    """Runs the cells of ``notebook`` in ``folder``, and drops no output of a kernel that a slow machine holds up."""
    return NotebookClient(
        notebook,
        timeout=240,
        iopub_timeout=240,
        startup_timeout=240,
        kernel_manager_class=ThisPython,
        resources={"metadata": {"path": str(folder)}},
        **options,
    )


def executed(name: str, folder: Path) -> nbformat.NotebookNode:
    """A notebook after all its cells have run, and no process of it is left."""
    notebook = nbformat.read(NOTEBOOKS[0].with_name(name), as_version=4)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    patient_client(notebook, folder).execute()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    return notebook


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> nbformat.NotebookNode:
    return executed("quickstart.ipynb", tmp_path_factory.mktemp("notebook"))


@pytest.fixture(scope="module")
def results_notebook(tmp_path_factory: pytest.TempPathFactory) -> nbformat.NotebookNode:
    return executed("results.ipynb", tmp_path_factory.mktemp("results"))


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def results(notebook: nbformat.NotebookNode) -> list[str]:
    """What the cells that end in a value show."""
    return [output.data["text/plain"] for output in outputs(notebook) if output.output_type == "execute_result"]


def text_of(notebook: nbformat.NotebookNode) -> str:
    """What was printed, without what a launch tells of a run that takes long to end."""
    return without_news("".join(output.text for output in outputs(notebook) if output.output_type == "stream"))


@pytest.mark.long
def test_the_last_cell_shows_the_curve(quickstart: nbformat.NotebookNode) -> None:
    code = [cell for cell in quickstart.cells if cell.cell_type == "code"]
    assert any("image/png" in output.get("data", {}) for output in code[-1].outputs)


def test_two_processes_learn_the_digits_from_a_notebook(quickstart: nbformat.NotebookNode) -> None:
    (accuracy,) = re.findall(r"^test accuracy: ([0-9.]+)$", text_of(quickstart), re.MULTILINE)
    assert float(accuracy) >= 0.97


def test_what_the_workers_print_reaches_the_notebook_once(quickstart: nbformat.NotebookNode) -> None:
    assert len(re.findall(r"^epoch 1: accuracy", text_of(quickstart), re.MULTILINE)) == 1


def test_results_come_back_edits_count_and_errors_are_shown(results_notebook: nbformat.NotebookNode) -> None:
    assert results(results_notebook) == [
        "[(6.0, [6.0, 22.0]), (22.0, [6.0, 22.0])]",
        "[(60.0, [60.0, 220.0]), (220.0, [60.0, 220.0])]",
    ]
    assert text_of(results_notebook) == "rank 1 failed: ValueError: no more data on rank 1\n"


def test_a_run_of_two_processes_goes_on_in_one(tmp_path: Path) -> None:
    first, second = results(executed("resume.ipynb", tmp_path))
    assert first.startswith("[(False, 3, ")
    assert second.startswith("[(True, 5, ")


def kinds_of_outputs(notebook: nbformat.NotebookNode) -> list[set[str]]:
    return [{output.output_type for output in cell.get("outputs", ())} for cell in notebook.cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_stored_as_they_ran_from_top_to_bottom(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert outputs(notebook) != []
    assert {output.output_type for output in outputs(notebook)} <= {"stream", "display_data", "execute_result"}
    assert {output.name for output in outputs(notebook) if output.output_type == "stream"} <= {"stdout"}


def test_stored_outputs_are_of_the_cells_as_they_are(
    quickstart: nbformat.NotebookNode, results_notebook: nbformat.NotebookNode
) -> None:
    for name, fresh in (("quickstart.ipynb", quickstart), ("results.ipynb", results_notebook)):
        stored = nbformat.read(NOTEBOOKS[0].with_name(name), as_version=4)
        assert kinds_of_outputs(stored) == kinds_of_outputs(fresh)
        assert results(stored) == results(fresh)
