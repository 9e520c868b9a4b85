"""What the directory makes of pulses, on a virtual clock: work is spread to within a tenth, also where times are noisy."""

import pytest

pytest.importorskip("ray")

from tests.unit.ray.clusters import Cluster

# Short ones come first, as in the search of tests/ray/test_many_nodes.py.
EPOCHS = [4, 4, 6, 6, 8, 8, 12, 12, 20, 20, 30, 30]
TRIALS = [(epochs, 0.4) for epochs in EPOCHS]
TOTAL = sum(epochs * seconds for epochs, seconds in TRIALS)


def shares(cluster):
    """Seconds that each node was busy, over those of an equal share."""
    busy = [pool.busy for pool in cluster.pools.values()]
    return [each * len(busy) / sum(busy) for each in busy]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise", [1.0, 2.0])
def test_work_is_spread(monkeypatch, count, noise, seed):
    cluster = Cluster(monkeypatch, count=count, noise=noise, seed=seed)
    cluster.run(TRIALS)
    assert max(shares(cluster)) <= 1.1, shares(cluster)
    assert sum(pool.moved for pool in cluster.pools.values()) <= len(TRIALS)  # none is sent to and fro


def test_the_slower_node_gets_less(monkeypatch):
    cluster = Cluster(monkeypatch, count=2, noise=1.5, speeds=[1.0, 0.5])
    seconds = cluster.run(TRIALS)
    assert max(shares(cluster)) <= 1.1, shares(cluster)
    assert seconds <= 1.1 * TOTAL / 1.5


def test_a_node_that_joins_half_way_takes_its_share_of_what_is_left(monkeypatch):
    cluster = Cluster(monkeypatch, count=2, noise=1.5)
    half = TOTAL / 4
    seconds = cluster.run(TRIALS, joins=[(half, "late")])
    assert cluster.pools["late"].busy >= 0.8 * (TOTAL - 2 * half) / 3
    assert seconds <= 1.1 * (half + (TOTAL - 2 * half) / 3)
