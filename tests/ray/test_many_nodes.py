"""Several nodes, each with a pool: work is spread by what is left of it, and follows nodes that join and leave."""

import time
from collections import Counter

import pytest

pytest.importorskip("ray")

import ray
from ray import tune
from ray._private.worker import global_worker
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

import hydra_tune_ray
from hydra_tune_ray.node.actors import find_actor
from hydra_tune_ray.node.pool_directory import DirectoryOptions
from hydra_tune_ray.pools import _directory, pools_of
from tests.ray.searches import EACH, build, empty_pools, expected, in_actor, same, searched, trained_by_itself

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ONE_DEVICE = {"devices": "cpu:1", "device_memory": "64MiB"}
# Of some tenths of a second for each report, as what is left to even out in the end is a report or two, and a move.
BATCHES = 240
# Long and short trials, the long ones last: without moves one node would have them at the end.
EPOCHS = [4, 4, 6, 6, 8, 8, 12, 12, 20, 20, 30, 30]
CONFIGS = [{"lr": 0.001 * (number + 1), "epochs": epochs, "batches": BATCHES} for number, epochs in enumerate(EPOCHS)]

TOTAL_UNITS = BATCHES * sum(EPOCHS)  # each step is one, as these trials fit as they are


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


def until(is_so):
    """Wait for what other processes do, however long they take: the time limit of the test ends the wait."""
    while not is_so():
        time.sleep(0.1)


def test_the_directory_is_beside_the_driver(nodes):
    nodes.add()
    home = ray.get_runtime_context().get_node_id()
    for number in range(8):  # on any of the nodes, all of them would be on this one once in 256 times
        plan = DirectoryOptions(name=f"beside-{number}", options={}, start_seconds=1.0, idle_seconds=None)
        directory = _directory(plan, detached=False)
        assert in_actor(directory, lambda directory: ray.get_runtime_context().get_node_id()) == home
        ray.kill(directory)


@pytest.mark.parametrize("count", [2, 3])
def test_work_is_spread(nodes, tmp_path, count):
    for _ in range(count - 1):
        nodes.add()
    trained = hydra_tune_ray.trainable(build_numbered, **ONE_DEVICE)
    check(run(trained, tmp_path))
    pools = empty_pools(trained)
    assert len(pools) == count
    # Of seconds that devices computed, which is what pools even out: two cores run three nodes at uneven speeds. A list
    # schedule (Graham) exceeds the mean by no more than this share of the longest trial, at any speeds of the nodes.
    equal = sum(pool.busy_seconds for pool in pools) / count
    bound = 1 + (1 - 1 / count) * max(EPOCHS) * count / sum(EPOCHS)
    figures = [(pool.busy_seconds / equal, pool.units_run, pool.moved) for pool in pools]
    assert max(pool.busy_seconds for pool in pools) <= bound * equal, figures
    assert any(pool.moved for pool in pools), figures
    pools_of(trained).close()


class Midway(tune.Callback):
    """Does something once there has been enough work; from the main thread, which Ray asks for.

    No trial goes on from its next report meanwhile, so that there is work left afterwards, however long it takes.
    """

    def __init__(self, trained, is_enough, act):
        self.trained, self.is_enough, self.act = trained, is_enough, act
        self.has_acted = False

    def __reduce__(self):
        return tune.Callback, ()  # Ray stores callbacks with the search

    def on_trial_result(self, iteration, trials, trial, result, **info):
        if not self.has_acted and self.is_enough(pools_of(self.trained).figures()):
            self.has_acted = True
            self.act()


def is_a_quarter(figures):
    return sum(pool.units_run for pool in figures) > TOTAL_UNITS / 4


def test_a_node_that_joins_takes_work(nodes, tmp_path):
    trained = hydra_tune_ray.trainable(build_numbered, **ONE_DEVICE)

    def join():
        nodes.add()
        until(lambda: len(pools_of(trained).figures()) == 2)

    check(run(trained, tmp_path, callbacks=[Midway(trained, is_a_quarter, join)]))
    assert nodes.others
    first, second = sorted(empty_pools(trained), key=lambda pool: pool.moved, reverse=True)
    assert first.moved >= 1
    assert second.units_run > TOTAL_UNITS / 8, (first, second)
    pools_of(trained).close()


class Draining(Midway):
    """Drains a node, and removes it once all trials have come to the other one."""

    def __init__(self, trained, nodes):
        super().__init__(
            trained, lambda figures: is_a_quarter(figures) and all(pool.trials for pool in figures), self.drain
        )
        self.nodes = nodes
        self.reports = Counter()
        self.gone = None

    def drain(self):
        other = self.other()
        at = int((time.time() + 3600) * 1000)
        reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        assert global_worker.gcs_client.drain_node(other.node_id, reason, "a test", at)[0]
        # Trials that the directory has not sent off yet could end there.
        actor = find_actor(other.name)
        until(lambda: in_actor(actor, lambda pool: not pool._pool._trials.load(pool._place.node).trials))

    def other(self):
        head = ray.get_runtime_context().get_node_id()
        (other,) = (pool for pool in pools_of(self.trained).figures() if pool.node_id != head)
        return other

    def on_trial_result(self, iteration, trials, trial, result, **info):
        if not self.has_acted:
            super().on_trial_result(iteration, trials, trial, result, **info)
        elif self.gone is None:
            # A trial's first report may be one that it has made before it left; with the second it has its state elsewhere.
            self.reports[trial.trial_id] += 1
            if all(each.last_result.get("done") or self.reports[each.trial_id] >= 2 for each in trials):
                self.gone = self.other()
                self.nodes.remove_one(is_killed=True)


def test_a_node_that_drains_gives_its_trials_away(nodes, tmp_path):
    """Without retries or checkpoints of Ray's: what has been computed there is not lost, and nothing fails."""
    nodes.add()
    trained = hydra_tune_ray.trainable(build_numbered, **ONE_DEVICE)
    draining = Draining(trained, nodes)
    # The trials' own processes are not on the node that goes: Ray begins such again by itself.
    on_head = tune.with_resources(trained, {"cpu": 0.01, "node:__internal_head__": 0.001})
    check(run(on_head, tmp_path, callbacks=[draining]))
    assert not nodes.others
    assert draining.gone.moved >= 1
    (left,) = empty_pools(trained)
    assert left.units_run + draining.gone.units_run == TOTAL_UNITS
    pools_of(trained).close()


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_node_that_leaves_loses_nothing(nodes, tmp_path, is_killed):
    nodes.add()
    trained = hydra_tune_ray.trainable(build_numbered, **ONE_DEVICE)

    def have_both_begun(figures):
        return len(figures) == 2 and all(pool.units_run > 1500 for pool in figures)

    leaving = Midway(trained, have_both_begun, lambda: nodes.remove_one(is_killed=is_killed))
    results = run(trained, tmp_path, checkpoints=EACH, failures=4, callbacks=[leaving])
    assert not nodes.others
    assert results.num_errors == 0
    wanted = trained_by_itself(CONFIGS)
    for result in results:
        found = hydra_tune_ray.load_module(build_numbered, result)
        assert same(found.state_dict(), wanted[result.config["number"]])
    assert len(empty_pools(trained)) == 1
    pools_of(trained).close()
