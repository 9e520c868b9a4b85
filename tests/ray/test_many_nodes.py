"""Several nodes, each with a pool: work is spread by what is left of it, and follows nodes that join and leave."""

import threading
import time

import pytest

pytest.importorskip("ray")

import ray
from ray import tune
from ray._private.worker import global_worker
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

import hydra_tune_ray
from hydra_tune_ray.pools import pools_of
from tests.ray.searches import EACH, build, empty_pools, expected, same, searched, trained_by_itself

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ONE_DEVICE = {"devices": "cpu:1", "device_memory": "64MiB"}
# Of some tenths of a second for each report, as what is left to even out in the end is a report or two, and a move.
BATCHES = 240
# Long and short trials, the long ones last: without moves one node would have them at the end.
EPOCHS = [4, 4, 6, 6, 8, 8, 12, 12, 20, 20, 30, 30]
CONFIGS = [{"lr": 0.001 * (number + 1), "epochs": epochs, "batches": BATCHES} for number, epochs in enumerate(EPOCHS)]

TOTAL_UNITS = 2 * BATCHES * sum(EPOCHS)  # each step is two


class Nodes:
    """A cluster of this machine."""

    def __init__(self):
        self.cluster = Cluster(initialize_head=True, head_node_args=self.options())
        self.others = []

    @staticmethod
    def options():
        return {"num_cpus": 1, "object_store_memory": 100 * 2**20, "node_ip_address": "127.0.0.1"}

    def add(self):
        self.others.append(self.cluster.add_node(**self.options()))

    def remove_one(self, *, is_killed):
        self.cluster.remove_node(self.others.pop(), allow_graceful=not is_killed)


@pytest.fixture
def nodes(one_ray):
    one_ray.shutdown()
    made = Nodes()
    one_ray.init(address=made.cluster.address, log_to_driver=False, logging_level="ERROR", _node_ip_address="127.0.0.1")
    yield made
    one_ray.shutdown()
    made.cluster.shutdown()


def run(trained, folder, **options):
    space = {"number": tune.grid_search(list(range(len(CONFIGS))))}
    return searched(trained, folder, space=space, max_concurrent_trials=len(CONFIGS), **options)


def build_numbered(config):
    return build(CONFIGS[config["number"]])


def check(results):
    assert results.num_errors == 0
    wanted = expected(CONFIGS)
    for result in results:
        frame = result.metrics_dataframe
        mine = wanted[result.config["number"]]
        assert list(frame["train_loss"]) == [mine[number - 1] for number in frame["training_iteration"]]
        assert result.metrics["training_iteration"] == len(mine)


@pytest.mark.parametrize("count", [2, 3])
def test_work_is_spread(nodes, tmp_path, count):
    for _ in range(count - 1):
        nodes.add()
    trained = hydra_tune_ray.trainable(build_numbered, **ONE_DEVICE)
    check(run(trained, tmp_path))
    pools = empty_pools(trained)
    assert len(pools) == count
    # Of seconds that devices computed, which is what pools even out: two cores run three nodes at uneven speeds.
    equal = sum(pool.busy_seconds for pool in pools) / count
    assert max(pool.busy_seconds for pool in pools) <= 1.1 * equal, [
        (pool.busy_seconds / equal, pool.units_run, pool.moved) for pool in pools
    ]
    pools_of(trained).close()


class Join(tune.Callback):
    """Adds a node once there has been some work; from the main thread, which Ray asks for."""

    def __init__(self, nodes, trained):
        self.nodes, self.trained = nodes, trained

    def __reduce__(self):
        return tune.Callback, ()  # Ray stores callbacks with the search

    def on_trial_result(self, iteration, trials, trial, result, **info):
        if not self.nodes.others and sum(pool.units_run for pool in pools_of(self.trained).figures()) > TOTAL_UNITS / 4:
            self.nodes.add()


def test_a_node_that_joins_takes_work(nodes, tmp_path):
    trained = hydra_tune_ray.trainable(build_numbered, **ONE_DEVICE)
    check(run(trained, tmp_path, callbacks=[Join(nodes, trained)]))
    assert nodes.others
    first, second = sorted(empty_pools(trained), key=lambda pool: pool.moved, reverse=True)
    assert first.moved >= 1
    assert second.units_run > TOTAL_UNITS / 8, (first, second)
    pools_of(trained).close()


def test_a_node_that_drains_gives_its_trials_away(nodes, tmp_path):
    """Without retries or checkpoints of Ray's: what has been computed there is not lost, and nothing fails."""
    nodes.add()
    trained = hydra_tune_ray.trainable(build_numbered, **ONE_DEVICE)
    pools = pools_of(trained)
    head = ray.get_runtime_context().get_node_id()
    drained = []

    def drain():
        while sum(pool.units_run for pool in pools.figures()) < TOTAL_UNITS / 4:
            time.sleep(0.1)
        (other,) = (pool for pool in pools.figures() if pool.node_id != head)
        at = int((time.time() + 3600) * 1000)
        reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        assert global_worker.gcs_client.drain_node(other.node_id, reason, "a test", at)[0]
        while any(pool.trials for pool in pools.figures() if pool.node_id == other.node_id):
            time.sleep(0.1)
        drained.extend(pool for pool in pools.figures() if pool.node_id == other.node_id)
        nodes.remove_one(is_killed=True)

    thread = threading.Thread(target=drain)
    thread.start()
    # The trials' own processes are not on the node that goes: Ray begins such again by itself.
    on_head = tune.with_resources(trained, {"cpu": 0.01, "node:__internal_head__": 0.001})
    check(run(on_head, tmp_path))
    thread.join()
    (gone,) = drained
    assert gone.moved >= 1
    (left,) = empty_pools(trained)
    assert left.units_run + gone.units_run == TOTAL_UNITS
    pools.close()


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_node_that_leaves_loses_nothing(nodes, tmp_path, is_killed):
    nodes.add()
    trained = hydra_tune_ray.trainable(build_numbered, **ONE_DEVICE)
    pools = pools_of(trained)

    def remove():
        while len(found := pools.figures()) < 2 or not all(pool.units_run > 1500 for pool in found):
            time.sleep(0.1)
        nodes.remove_one(is_killed=is_killed)

    thread = threading.Thread(target=remove)
    thread.start()
    results = run(trained, tmp_path, checkpoints=EACH, failures=4)
    thread.join()
    assert results.num_errors == 0
    wanted = trained_by_itself(CONFIGS)
    for result in results:
        found = hydra_tune_ray.load_module(build_numbered, result)
        assert same(found.state_dict(), wanted[result.config["number"]])
    assert len(empty_pools(trained)) == 1
    pools.close()
