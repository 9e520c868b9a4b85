"""What a pool remembers of its trials."""

import asyncio
from dataclasses import replace

import pytest
import torch

pytest.importorskip("ray")

import ray

from hydra_tune import TrainTask
from hydra_tune.pool.job import JobProgress
from hydra_tune_ray.messages import BeginRequest, EndOutcome, MoveOutcome, ReportOutcome, TrialTicket
from hydra_tune_ray.node import node_pool
from hydra_tune_ray.node.actors import NodePoolSpec
from hydra_tune_ray.node.nodes import DeviceNode
from hydra_tune_ray.node.pool_runtime import NodePoolRuntime
from hydra_tune_ray.node.trial_leases import LeasedTrialTable

REQUEST = BeginRequest(trial_id="t", key="t-1", name="trial", build=b"", config={})


def test_a_trial_that_has_left_is_told_again_where_to_for_a_while(monkeypatch):
    """An answer may get lost, and its client asks again."""
    now = [100.0]
    monkeypatch.setattr("hydra_tune_ray.node.trial_leases.time.monotonic", lambda: now[0])
    trials = LeasedTrialTable(10.0)
    held = add(trials)
    moved = trials.leave(held, MoveOutcome(pool="other", files=None), 30.0)
    assert trials.get("t-1") is None
    for _ in range(2):
        assert trials.moved("t-1") is moved
    now[0] = 129.0
    assert trials.expired() == []
    assert trials.moved("t-1") is moved
    now[0] = 131.0
    trials.expired()
    assert trials.moved("t-1") is None


def test_a_trial_expires_unless_it_is_renewed(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("hydra_tune_ray.node.trial_leases.time.monotonic", lambda: now[0])
    trials = LeasedTrialTable(10.0)
    held = add(trials)
    now[0] += REQUEST.lease_seconds - 1
    assert trials.expired() == []
    trials.renew(held)
    now[0] += REQUEST.lease_seconds - 1
    assert trials.expired() == []
    now[0] += 50
    assert trials.expired(50.0) == []  # the pool itself was stopped
    now[0] += 2
    assert trials.expired() == [held]


class Job:
    """A job of the pool, as far as what it has left goes."""

    state = "running"

    def __init__(self, **progress):
        self.progress = JobProgress(
            **{"epoch": 0, "epochs": 4, "step": 0, "num_steps": None, "remaining_seconds": None, "num_shards": 1}
            | {"units_run": 0, "metrics": {}}
            | progress
        )
        self.priorities = []

    def set_priority(self, priority):
        self.priorities.append(priority)


@pytest.mark.parametrize(
    ("job", "files", "left"),
    [
        (None, None, (None, None)),
        (Job(), None, (None, 4.0)),
        (Job(epoch=1, remaining_seconds=0.01), None, (None, 3.0)),  # of an epoch that nobody has counted
        (Job(), {"state": b""}, (None, None)),
        (Job(step=30, num_steps=40, remaining_seconds=5.0), {"state": b""}, (5.0, 1.0)),
    ],
)
def test_what_is_not_known_of_a_trial_is_not_told(job, files, left):
    held = add(LeasedTrialTable(10.0), replace(REQUEST, files=files))
    held.job = job
    assert held.left() == left


def test_a_trial_that_is_to_leave_comes_to_its_report_first():
    held = add(LeasedTrialTable(10.0))
    held.job = Job()
    held.send_to("other")
    assert held.job.priorities == [1]
    held.stay()
    assert held.job.priorities == [1, 0]
    held.job.state = "queued"  # it leaves at once, and is not to begin before that
    held.send_to("other")
    assert held.job.priorities == [1, 0]


def add(trials, request=REQUEST):

    async def added():
        return trials.add(request)[0]

    return asyncio.run(added())


def stops_itself(config):
    return TrainTask(
        model=lambda: torch.nn.Linear(1, 1),
        optimizer=lambda given: torch.optim.SGD(given, lr=0.01),
        train=lambda: [(torch.ones(2, 1), torch.ones(2, 1))],
        loss=torch.nn.functional.mse_loss,
        epochs=4,
        stop=lambda history: len(history) == config["reports"],
    )


def test_the_state_of_a_trial_that_stops_itself_can_be_saved(monkeypatch):
    """As Ray does by default at the end of a trial; the pool learns only from the end that no report follows."""
    monkeypatch.setattr(node_pool, "DirectoryConnection", lambda *names: None)
    request = replace(REQUEST, build=ray.cloudpickle.dumps(stops_itself), config={"reports": 2})

    async def trained():
        node = DeviceNode(node_id="n", devices="cpu:1", num_gpus=0, num_devices=1)
        pool = node_pool.NodePool(NodePoolSpec(name="p", directory="d", node=node, options={}))
        pool._training = NodePoolRuntime({"devices": "cpu:1", "device_memory": "64MiB"})  # else `begin` opens it
        try:
            await pool.begin(request)
            outcome = await pool.next(request.key, 0)
            numbers = []
            while isinstance(outcome, ReportOutcome):
                numbers.append(outcome.number)
                outcome = await pool.next(request.key, outcome.number)
            return numbers, outcome, await pool.save(request.key, None)
        finally:
            await pool.close()

    numbers, outcome, files = asyncio.run(trained())
    assert numbers == [1, 2]
    assert isinstance(outcome, EndOutcome)
    assert outcome.status == "completed"
    assert any(name.endswith(".manifest") for name in files)


def test_files_of_a_trial_that_is_handed_on_go_with_its_end(monkeypatch):
    """Each client that takes the trial over asks with a key of its own."""
    monkeypatch.setattr(node_pool, "DirectoryConnection", lambda *names: None)
    request = replace(REQUEST, build=ray.cloudpickle.dumps(stops_itself), config={"reports": 4})

    async def trained():
        node = DeviceNode(node_id="n", devices="cpu:1", num_gpus=0, num_devices=1)
        pool = node_pool.NodePool(NodePoolSpec(name="p", directory="d", node=node, options={}))
        training = pool._training = NodePoolRuntime({"devices": "cpu:1", "device_memory": "64MiB"})
        try:
            await pool.begin(request)
            await pool.next(request.key, 0)
            files = await pool.save(request.key, None)
            await pool.begin(replace(request, key="t-2", files=files, number=1))
            assert isinstance(await pool.next("t-2", 1), ReportOutcome)
            ticket = TrialTicket(pool="p", key="t-2", number=2, config="")
            await pool.begin(replace(request, key="t-3", files=files, number=2), ticket)
            resumed = [path.name for path in training._scratch.iterdir()]
            await pool.end("t-3")
            return resumed, list(training._scratch.iterdir())
        finally:
            await pool.close()

    assert asyncio.run(trained()) == (["t-2"], [])
