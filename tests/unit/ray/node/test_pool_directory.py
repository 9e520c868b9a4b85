"""What the directory knows of trials on their way: they count where they go, with what they had left where they were."""

import asyncio
import time

import pytest

pytest.importorskip("ray")

from hydra_tune_ray.messages import PoolLoadReport
from hydra_tune_ray.node.nodes import DeviceNode
from hydra_tune_ray.node.pool_directory import DirectoryOptions, PoolDirectory, _RegisteredPool

NODES = {name: DeviceNode(node_id=name, devices="cpu:1", num_gpus=0, num_devices=1) for name in ("a", "b")}


def told(name, trials, leaving=None):
    """A report on trials with epochs of 100 seconds."""
    seconds = trials | {key: left for key, (_, left) in (leaving or {}).items()}
    return PoolLoadReport(
        node=NODES[name],
        trials=trials,
        started=frozenset(trials),
        leaving=leaving or {},
        epochs={key: left / 100 for key, left in seconds.items() if left is not None},
    )


@pytest.fixture
def directory(monkeypatch):
    monkeypatch.setattr(PoolDirectory, "_watch_nodes", lambda self: None)  # asks Ray
    monkeypatch.setattr("hydra_tune_ray.node.pool_directory.time.monotonic", lambda: 100.0)
    made = PoolDirectory(DirectoryOptions(name="pools", options={}, start_seconds=1.0, idle_seconds=None))
    made._pools = {name: _RegisteredPool(None, told(name, {}), time.monotonic()) for name in NODES}
    return made


def test_a_trial_that_is_on_its_way_counts_where_it_goes(directory):
    async def pulses():
        assert not await directory.pulse("a", told("a", {"x": 40.0, "y": 40.0}, {"long": ("b", 100.0)}), None)
        assert not await directory.pulse(
            "a", told("a", {"x": 40.0, "y": 40.0}), None
        )  # it has left, and has not come yet
        assert directory._works()["b"].trials == {"long": 100.0}

    asyncio.run(pulses())


def test_a_trial_that_has_moved_has_left_what_it_had(directory):
    async def pulses():
        await directory.pulse("a", told("a", {"long": 100.0, "x": 2.0, "y": 2.0}), None)
        await directory.pulse("a", told("a", {"x": 2.0, "y": 2.0}, {"long": ("b", 99.0)}), None)
        await directory.pulse("a", told("a", {"x": 2.0, "y": 2.0}), None)
        await directory.pulse("b", told("b", {"long": None}), None)  # it is being built there
        assert directory._works()["b"].trials["long"] == 99.0
        await directory.pulse("b", told("b", {"long": 98.0}), None)
        assert directory._works()["b"].trials["long"] == 98.0
        await directory.pulse("b", told("b", {}), None)
        assert directory._left.seconds("long") == directory._left.usual

    asyncio.run(pulses())


def test_all_trials_leave_a_node_that_drains_and_none_comes(directory):
    async def pulses():
        assert not await directory.pulse("b", told("b", {"y": 40.0}), None)
        directory._draining = frozenset({"a"})
        assert await directory.pulse("a", told("a", {"x": 1.0, "z": 1.0}), None) == {"x": "b", "z": "b"}
        assert not await directory.pulse("a", told("a", {}, {"x": ("b", 1.0), "z": ("b", 1.0)}), None)
        assert not await directory.pulse("b", told("b", {"y": 40.0, "x": 1.0, "z": 1.0}), None)
        assert await directory.place("new", "a", 1.0) == "b"

    asyncio.run(pulses())


def test_where_all_nodes_drain_trials_stay_and_come_as_before(directory):
    async def pulses():
        directory._draining = frozenset({"a", "b"})
        assert not await directory.pulse("a", told("a", {"x": 1.0, "z": 1.0}), None)
        assert await directory.place("new", "a", 1.0) == "b"

    asyncio.run(pulses())


def test_others_may_leave_while_one_waits_for_its_report(directory):
    async def pulses():
        asked = told("a", {"x": 40.0, "y": 40.0, "z": 40.0}, {"short": ("b", 1.0)})
        assert set((await directory.pulse("a", asked, None)).values()) == {"b"}

    asyncio.run(pulses())
