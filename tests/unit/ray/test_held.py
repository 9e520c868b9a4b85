"""What a pool remembers of its trials."""

import asyncio

import pytest

pytest.importorskip("ray")

from hydra_tune_ray.held import HeldTrials
from hydra_tune_ray.messages import Begin, Moved

REQUEST = Begin(trial_id="t", key="t-1", name="trial", build=b"", config={})


def test_a_trial_that_has_left_is_told_again_where_to_for_a_while(monkeypatch):
    """An answer may get lost, and its client asks again."""
    now = [100.0]
    monkeypatch.setattr("hydra_tune_ray.held.time.monotonic", lambda: now[0])
    trials = HeldTrials(10.0)
    held = add(trials)
    moved = trials.leave(held, Moved(pool="other", files=None), 30.0)
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
    monkeypatch.setattr("hydra_tune_ray.held.time.monotonic", lambda: now[0])
    trials = HeldTrials(10.0)
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


def add(trials):

    async def added():
        return trials.add(REQUEST)[0]

    return asyncio.run(added())
