"""The notebooks run, and `phalanx.launch` feels at home in a real kernel: progress, errors, the stop button."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient

from tests.examples.conftest import EXAMPLES, JOB_BOUND_S, environment
from tests.support.backends import FIRST

pytestmark = pytest.mark.timeout(2 * JOB_BOUND_S)

NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))
DIFFERENCE = {"custom_loop": 1e-9, "first_job": 1e-4}
"""What the last cell may say: how far two workers and one are apart."""


@pytest.mark.slow  # what a kernel shows is tested below
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=int(JOB_BOUND_S), resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment(FIRST))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "phalanx: starting 2 workers\n" in shown
    if path.stem in DIFFERENCE:
        value = outputs[-1].data["text/plain"].removeprefix("np.float64(").removesuffix(")")
        assert float(value) < DIFFERENCE[path.stem]


def test_notebooks_are_stored_without_outputs() -> None:
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            assert (cell.get("outputs") or [], cell.get("execution_count")) == ([], None), path.name


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    manager, client = start_new_kernel(kernel_name="python3", env=environment(FIRST), cwd=str(tmp_path))
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def messages(client: BlockingKernelClient, code: str) -> Iterator[tuple[str, Any]]:
    """What a cell shows, message by message."""
    request = client.execute(code)
    while True:
        message = client.get_iopub_msg(timeout=JOB_BOUND_S)
        if message["parent_header"].get("msg_id") == request:
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return
            yield message["msg_type"], message["content"]


FAILING = """
import phalanx

def check(batch):
    raise ValueError(f"batch {batch} is bad")

phalanx.launch(check, args=(5,))
"""
ENDLESS = """
def count():
    import time
    for number in range(10**6):
        print(f"\\r{number} steps", end="", flush=True)
        time.sleep(0.1)

phalanx.launch(count)
"""


def test_a_cell_shows_errors_and_progress_and_can_be_stopped(
    kernel: tuple[KernelManager, BlockingKernelClient],
) -> None:
    manager, client = kernel
    (error,) = [content for kind, content in messages(client, FAILING) if kind == "error"]
    shown = "\n".join(error["traceback"])
    assert error["ename"] == "ValueError"
    assert 'raise ValueError(f"batch {batch} is bad")' in shown, "the line of the cell, in the worker's traceback"
    assert "The job ended: worker/" in shown

    errors, progress = [], ""
    for kind, content in messages(client, ENDLESS):
        if kind == "stream":
            progress += content["text"]
            if progress.count("\r") == 3:  # three drawings of one line, without a line break
                manager.interrupt_kernel()
        elif kind == "error":
            errors.append(content)
    assert "\r" in progress
    assert " steps" in progress
    (stopped,) = errors
    assert stopped["ename"] == "KeyboardInterrupt"
    assert "job_supervisor" not in "\n".join(stopped["traceback"]), "where the launcher waited is of no interest"
    assert list(messages(client, "1 + 1"))[-1][1]["data"]["text/plain"] == "2"
