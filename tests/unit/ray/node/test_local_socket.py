"""The direct way to a pool says what Ray would say, or nothing."""

import asyncio
import math
import threading

import numpy as np
import pytest

pytest.importorskip("ray")

from hydra_tune_ray.messages import EndOutcome, MoveOutcome, ReportOutcome, WaitingOutcome
from hydra_tune_ray.node.local_socket import LocalSocketClient, LocalSocketServer

ANSWERS = {
    "report": ReportOutcome(number=3, step=2, metrics={"loss": 0.1 + 0.2, "up": math.inf, "n": 7}, is_last=False),
    "waits": WaitingOutcome(),
    "over": EndOutcome(status="failed", error="x"),
    "moved": MoveOutcome(pool="there", files=None),
    "odd": ReportOutcome(number=1, step=0, metrics={"loss": np.float32(0.5)}, is_last=True),
}


@pytest.fixture
def server():
    """One that answers by the key that it is asked for; in a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def answer(key, answered):
        if key == "number":
            return ReportOutcome(number=answered + 1, step=0, metrics={"loss": math.nan}, is_last=False)
        return ANSWERS[key]

    def run(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    made = LocalSocketServer(answer)
    run(made.open())
    yield made
    loop.call_soon_threadsafe(made.close)
    run(asyncio.sleep(0))
    for task in asyncio.all_tasks(loop):
        loop.call_soon_threadsafe(task.cancel)
    run(asyncio.sleep(0.01))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def line(server):
    made = LocalSocketClient(server.path, 60)
    yield made
    made.close()


def test_reports_come_out_as_they_went_in(line):
    assert line.next("report", 2) == ANSWERS["report"]
    assert line.next("waits", 3) == WaitingOutcome()
    found = line.next("number", 41)
    assert found.number == 42
    assert math.isnan(found.metrics["loss"])


@pytest.mark.parametrize("key", ["over", "moved", "odd"])
def test_what_is_more_than_a_report_is_asked_by_ray(line, key):
    assert line.next(key, 0) is None
    assert line.next("report", 2) == ANSWERS["report"]


def test_a_pool_that_fails_hangs_up(line):
    with pytest.raises(OSError, match="hung up"):
        line.next("no such key", 0)


def test_nobody_listens_any_more(server):
    path = server.path
    server.close()
    with pytest.raises(OSError, match="No such file"):
        LocalSocketClient(path, 60)


def test_a_folder_that_is_too_deep_for_a_socket(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))

    async def opened():
        made = LocalSocketServer(None)
        await made.open()
        made.close()
        return made.path

    assert asyncio.run(opened()) == ""
    assert not list(deep.iterdir())
