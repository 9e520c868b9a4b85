"""The live view in a notebook that has nothing but a kernel: below its cell, updated while the pool works."""

import json
import sys
from textwrap import dedent

import nbformat
import pytest
from nbclient import NotebookClient

SETUP = """
import torch
from hydra_tune import HydraExecutor, TrainTask

x = torch.randn(64, 8)
task = TrainTask(
    model=lambda: torch.nn.Linear(8, 1),
    optimizer=torch.optim.SGD,
    loss=torch.nn.functional.mse_loss,
    train=lambda: [(x, x.sum(1, keepdim=True))] * 4,
    epochs=3,
)
pool = HydraExecutor(devices="cpu:1", device_memory="1MiB")
"""
SHOW = """
import dataclasses, threading
from IPython.display import DisplayHandle

updated, update = threading.Semaphore(0), DisplayHandle.update

def counted(*arguments, **options):
    update(*arguments, **options)
    updated.release()

DisplayHandle.update = counted

passes = []

def watched():  # the first pass goes on until the view was drawn twice: once from beginning to end within the pass
    mine = len(passes)
    passes.append(mine)
    for number in range(4):
        if number == 2 and mine == 0:
            assert updated.acquire(timeout=60) and updated.acquire(timeout=60)
        yield x, x.sum(1, keepdim=True)

print("before")
with pool.live():
    print("within")
    results = pool.run([dataclasses.replace(task, train=watched)] * 2)
print("after", [result.status for result in results])
"""
STOP = """
try:
    with pool.live():
        job = pool.submit(task)
        raise KeyboardInterrupt
except KeyboardInterrupt:
    job.cancel()
pool.shutdown()
import threading
print([thread.name for thread in threading.enumerate() if thread.name.startswith("hydra-")])
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run cells in a kernel; returns their outputs, and each text that was shown in the place of an earlier one."""
    kernels = tmp_path / "kernels" / "here"
    kernels.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernels / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "here", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    updates = []

    class Client(NotebookClient):
        def process_message(self, message, cell, cell_index):
            if message["msg_type"] == "update_display_data":
                updates.append(message["content"]["data"]["text/plain"])
            return super().process_message(message, cell, cell_index)

    def run(*cells):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(dedent(cell)) for cell in cells])
        Client(notebook, timeout=120, kernel_name="here").execute()
        return [cell["outputs"] for cell in notebook["cells"]], updates

    return run


@pytest.mark.filterwarnings("default::DeprecationWarning", "default::ResourceWarning", "default::RuntimeWarning")
@pytest.mark.slow
def test_a_cell_shows_the_pool_at_work_and_keeps_its_last_state(run):
    outputs, updates = run(SETUP, SHOW, STOP)
    shown = [output for output in outputs[1] if output["output_type"] == "display_data"]
    printed = "".join(output.get("text", "") for output in outputs[1] if output["output_type"] == "stream")
    assert printed == "before\nwithin\nafter ['completed', 'completed']\n"  # and no warning on standard error
    (last,) = shown  # it was shown once, and updated in its place
    text = last["data"]["text/plain"]
    assert text.splitlines()[1].startswith("2 ended  2 done  0 pruned  0 failed  0 in flight")
    assert "<pre" in last["data"]["text/html"]
    assert len(updates) >= 2
    assert any("job 0 running" in update for update in updates)
    assert "".join(output.get("text", "") for output in outputs[2] if output["output_type"] == "stream") == "[]\n"
