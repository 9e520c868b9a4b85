"""The notebook runs from its first cell to its last, in a kernel of its own, and shows what it says."""

import shutil

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.examples import EXAMPLES

NOTEBOOK = "hydra_tune.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    for folder in ("digits", "notebook"):
        shutil.copytree(EXAMPLES / folder, tmp_path / folder)
    notebook = nbformat.read(tmp_path / "notebook" / NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path / "notebook")}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "best val_acc 0." in printed
    assert "shards" in printed
    assert "units run" in printed
    assert "makespan" in printed
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(EXAMPLES / "notebook" / NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
