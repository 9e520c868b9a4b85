"""What a step is expected to move, held against counts made by hand."""

import pytest

from hydra_tune.shard.cost.pilot import ShardCost
from hydra_tune.shard.cost.traffic_model import StepAccessPattern, step_traffic

WEIGHTS, STATE, VALUES, WORK = 100, 200, 10, 40


def cost(**changes):
    found = {
        "state_bytes": WEIGHTS,
        "value_bytes": VALUES,
        "handed_bytes": 0,
        "optimizer_bytes": STATE,
        "forward_workspace": WORK,
        "backward_workspace": WORK + WEIGHTS,
        "update_workspace": 0,
        "first_update_workspace": 0,
        "trained_bytes": WEIGHTS,
    }
    return ShardCost(**(found | changes))


ALONE = StepAccessPattern(sends_ahead=False)
ONE_UPDATE = 2 * WEIGHTS + STATE


@pytest.mark.parametrize("optimizer_bytes", [STATE, 0], ids=["Adam", "plain SGD"])
@pytest.mark.parametrize("habits", [StepAccessPattern(), ALONE, StepAccessPattern(waits=True)])
def test_nothing_moves_where_all_fits(habits, optimizer_bytes):
    moved = step_traffic([cost(optimizer_bytes=optimizer_bytes)] * 3, 100_000, habits)
    assert (moved.nbytes, moved.copies) == (0, 0)


def test_units_are_counted():
    assert step_traffic([cost()] * 3, 100_000).units == 2 + 3 + 3


def test_with_room_for_one_update_a_step_moves_weights_three_times_and_state_twice():
    shards = 6
    moved = step_traffic([cost(value_bytes=0)] * shards, ONE_UPDATE, ALONE)
    # Shard 0 is on the device from its backward until its next forward, and the last shard has one unit of the two.
    assert moved.nbytes == shards * (3 * WEIGHTS + 2 * STATE) - 2 * WEIGHTS


def test_optimizer_state_on_the_host_never_moves_and_gradients_go_there():
    shards = 6
    costs = [cost(value_bytes=0, updates_on_host=True)] * shards
    moved = step_traffic(costs, 2 * WEIGHTS + WORK, ALONE)
    # Gradients down; weights up for the forward and, but for the last shard, for the backward.
    assert moved.nbytes == shards * WEIGHTS + (2 * shards - 1) * WEIGHTS


def test_the_more_room_the_fewer_bytes():
    costs = [cost()] * 8
    found = [step_traffic(costs, ONE_UPDATE + 300 * extra, ALONE).nbytes for extra in range(9)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] == 0


def test_smaller_shards_leave_more_on_the_device():
    """The same model in two and in eight shards; a unit of the larger ones takes the room of what could have stayed."""
    budget = 2 * 1200
    large = cost(state_bytes=400, optimizer_bytes=800, trained_bytes=400, backward_workspace=900)
    small = cost(backward_workspace=225)
    assert step_traffic([small] * 8, budget, ALONE).nbytes < 0.8 * step_traffic([large] * 2, budget, ALONE).nbytes
