"""A notebook in JupyterLab, driven by a real browser, as somebody at a screen runs it."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

from accelerate_cpp.launch.plan.host_resources import free_port

pytestmark = pytest.mark.long

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("jupyterlab")

SHOWS = """
import os
import matplotlib.pyplot as plt
import torch
from IPython.display import HTML, display
from tqdm.auto import tqdm
from accelerate_cpp import Accelerator, notebook_launcher

def train():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in tqdm(range(50), desc="steps"):
        loss = model(torch.ones(8, 4)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    plt.figure(figsize=(4, 2))
    plt.plot(losses)
    plt.show()
    display(HTML(f"<b>shown by rank {accelerator.process_index}</b>"))
    return len(losses)

notebook_launcher(train, num_processes=2)
"""
NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
PATIENCE_SECONDS = 240.0


@pytest.fixture
def browser() -> Iterator[Any]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium: Debian's package chromium has it")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def laboratory(tmp_path: Path) -> Iterator[str]:
    """The address of a JupyterLab with the notebook of a name, whose kernels run this Python."""
    notebook = nbformat.read(NOTEBOOKS / "results.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []  # those that are stored are not to be taken for those of this run
    nbformat.write(notebook, tmp_path / "results.ipynb")
    notebook.cells = [nbformat.v4.new_code_cell(SHOWS)]
    nbformat.write(notebook, tmp_path / "shows.ipynb")
    port, token = free_port(), secrets.token_hex(16)
    # Settings, kernels and histories of the user are not looked at, and not touched.
    own = {f"JUPYTER_{kind}_DIR": str(tmp_path / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    command += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={tmp_path}"]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        _until_it_answers(f"{address}/api?token={token}", server, tmp_path / "server.log")
        yield f"{address}/lab/tree/{{}}?token={token}"
    finally:
        family = [server_process := psutil.Process(server.pid), *server_process.children(recursive=True)]
        server.terminate()
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_SECONDS)
        assert alive == []


def _until_it_answers(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            urllib.request.urlopen(address).close()
            return
        except OSError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)


def _running(browser: Any, address: str) -> Any:
    """The page of a notebook whose cells have been started."""
    page = browser.new_page(viewport={"width": 1280, "height": 1400})
    page.set_default_timeout(PATIENCE_SECONDS * 1000)
    page.goto(address)
    page.get_by_text(re.compile(r"\| Idle$")).first.wait_for()  # the kernel is there, and the menu offers to run
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator(".lm-Menu-item").filter(has_text=re.compile(r"^Run All( Cells)?\s*$")).click()
    return page


def _screenshot(page: Any, name: str, folder: Path) -> Path:
    path = Path(os.environ.get("ACCELERATE_CPP_TEST_SCREENSHOTS", folder)) / name
    page.screenshot(path=path)
    return path


def test_all_cells_run_and_their_results_are_to_be_seen(browser: Any, laboratory: str, tmp_path: Path) -> None:
    page = _running(browser, laboratory.format("results.ipynb"))
    notebook = page.locator(".jp-NotebookPanel")
    failure = notebook.get_by_text("rank 1 failed: ValueError: no more data on rank 1")
    failure.wait_for()
    shown = notebook.inner_text()
    screenshot = _screenshot(page, "jupyterlab.png", tmp_path)
    assert "[(6.0, [6.0, 22.0]), (22.0, [6.0, 22.0])]" in shown
    assert "[(60.0, [60.0, 220.0]), (220.0, [60.0, 220.0])]" in shown
    assert not re.search(r"Traceback|Error:(?! no more data)", shown)
    assert screenshot.stat().st_size > 10_000
    page.close()


def test_what_rank_0_shows_is_live_in_the_cell(browser: Any, laboratory: str, tmp_path: Path) -> None:
    page = _running(browser, laboratory.format("shows.ipynb"))
    outputs = page.locator(".jp-NotebookPanel .jp-OutputArea")
    outputs.get_by_text("[50, 50]").wait_for()
    outputs.get_by_text("50/50").wait_for()
    _screenshot(page, "shows.png", tmp_path)
    shown = outputs.first.inner_text()
    assert shown.count("shown by rank 0") == 1
    assert "shown by rank 1" not in shown
    assert "fork" not in shown
    assert outputs.locator("img").count() == 1
    assert outputs.locator(".widget-hprogress, .progress").first.is_visible()
    page.close()
