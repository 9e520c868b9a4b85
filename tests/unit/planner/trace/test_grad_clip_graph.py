"""Steps that clip gradients by the norm of all of a member's: their updates come behind that norm, planned or not."""

import pytest
import torch
from torch.nn import functional

from benchmarks.mutwo_least import MemoryLowerBound, least
from hydra_tune.devices.own_generator import drawing_from
from hydra_tune.planner.cost.peak_memory import curve, peak_of
from hydra_tune.planner.ir.plan_state import ScheduleSegment, undecided
from hydra_tune.planner.ir.verify import verify_schedule
from tests.unit.planner.hand import array as array_by_hand
from tests.unit.planner.hand import op
from tests.unit.planner.machine import Machine, alone
from tests.unit.planner.made import EXAMPLES, OPTIMIZERS, run_unplanned, sub_array
from tests.unit.planner.run.test_planned_run import array, assert_same_as_unplanned, limited, tracked

NOT_MET = {("cnn", 0.4): 0.41}
"""Where no plan is within a limit, for all gradients are there beside the activations; and a share in which one is."""
CASES = [
    pytest.param(*case, marks=[] if case == ("cnn", "sgd", 0.6) else pytest.mark.slow)
    for case in (
        (name, optimizer, share)
        for name in ("cnn", "transformer")
        for optimizer in ("sgd", "adamw")
        for share in (1.0, 0.8, 0.6, 0.4)
    )
]


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize(("name", "optimizer", "share"), CASES)
def test_a_pair_has_the_bits_of_the_unplanned_run_in_the_memory_that_was_planned(name, optimizer, share):
    options = {"optimizer": optimizer, "is_clipped": True}
    schedule = limited((name, name), share, **options)
    verify_schedule(schedule)
    assert_same_as_unplanned(schedule, (name, name), **options)
    measured, predicted = tracked(schedule, (name, name), **options)
    assert 0.9 * predicted <= measured <= predicted
    assert (predicted <= schedule.limit_bytes - schedule.static_bytes) == ((name, share) not in NOT_MET)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "optimizer", "share"), [one.values for one in CASES])
def test_so_has_a_sub_array_by_itself(name, optimizer, share):
    options = {"optimizer": optimizer, "is_clipped": True}
    schedule = limited((name,), share, **options)
    verify_schedule(schedule)
    assert_same_as_unplanned(schedule, (name,), (3,), **options)
    assert (peak_of(schedule)[1].peak_bytes <= schedule.limit_bytes) == ((name, share) not in NOT_MET)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), NOT_MET)
def test_where_a_limit_is_not_met_the_bound_says_so_and_is_met_itself(name, share):
    bound = least(array(name, is_clipped=True)).num_bytes
    schedule = limited((name, name), share, is_clipped=True)
    assert bound > schedule.limit_bytes - schedule.static_bytes
    schedule = limited((name, name), NOT_MET[name, share], is_clipped=True)
    assert peak_of(schedule)[1].peak_bytes == schedule.static_bytes + bound
    options = {"optimizer": "sgd", "is_clipped": True}
    assert_same_as_unplanned(limited((name, name), NOT_MET[name, share], **options), (name, name), **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "transformer"])
def test_each_member_is_clipped_as_torch_clips_it_alone(name):
    made = sub_array(name, count=3, optimizer="sgd", is_clipped=True)
    expected = [_alone(made, index, name) for index in range(made.count)]
    assert any(norm > limit for (_, norm), limit in zip(expected, made.limits.tolist(), strict=True))
    assert made.limits[-1].isinf()
    run_unplanned(made, 0)
    for index, (state, _) in enumerate(expected):
        for key, tensor in state.items():
            torch.testing.assert_close(made.state[key][index], tensor, rtol=1e-3, atol=1e-4)


def _alone(made, index, name):
    """A member's own model after a step by itself, and its norm."""
    model = EXAMPLES[name][0]()
    model.load_state_dict({key: tensor[index] for key, tensor in made.state.items()})
    own = OPTIMIZERS["sgd"](model.parameters())
    own.param_groups[0]["lr"] *= 1 + 0.1 * index
    generator = torch.Generator()
    generator.set_state(made.generators.members[index].get_state())
    x, y = (tensor[index] for tensor in made.batch(0))
    with drawing_from(generator):
        functional.cross_entropy(model(x), y).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), made.limits[index].item())
    own.step()
    return model.state_dict(), norm.item()


def test_updates_come_behind_the_norm_and_the_smallest_first():
    step = sub_array("cnn", optimizer="sgd", is_clipped=True).step
    (limits,) = (node for node in step.graph.nodes if node.name == step.limits)
    ranks = {node: rank for rank, node in enumerate(step.ops)}
    known = min(ranks[user] for user in limits.users)
    norms = [node for node in step.ops if "vector_norm" in str(node.target)]
    parameters = {argument: name for name, argument in step.state.items() if (name, "momentum_buffer") in step.moments}
    assert len(norms) == len(parameters) + 1  # of each gradient, and of those
    assert all(ranks[node] < known for node in norms)
    order = []
    for rank, node in enumerate(step.ops):
        written = [argument for argument in step.seen.writes[node.name] if argument in parameters]
        assert not written or rank > known
        order += [argument for argument in written if argument not in order]
    sizes = [step.geometry[argument].nbytes for argument in order]
    assert len(order) == len(parameters)
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def clipping():
    """Two layers, whose gradients w1 and w0 are kept until the norm of both is known."""
    forward = [op("z0"), op("z1", reads=["z0"]), op("loss", reads=["z1"])]
    backward = [
        op("d1", reads=["z1", "loss"]),
        op("w1", reads=["d1", "z0"]),
        op("n1", reads=["w1"]),
        op("w0", reads=["d1", "z0"]),
        op("n0", reads=["w0"]),
        op("factor", reads=["n1", "n0"]),
        op("u0", reads=["w0", "factor", "p0"], makes=(), writes=["p0"]),
        op("u1", reads=["w1", "factor", "p1"], makes=(), writes=["p1"]),
    ]
    sizes = {"z0": 8, "z1": 2, "w1": 4, "w0": 2}
    return array_by_hand(forward, backward, sizes, copy={"z0": 1.0, "z1": 1.0}, static=10, results=["loss"])


def test_gradients_count_until_the_updates_behind_the_norm():
    """Algorithm G on fingers: z1 goes with d1, z0 with w0, and each gradient with its own update."""
    schedule = undecided((clipping(),), 1 << 60)
    assert curve(schedule, ScheduleSegment(0, None)) == (20, 18 + 4, 22, 22 + 2, 16, 16, 16, 14)
    assert least(clipping()) == MemoryLowerBound(14, "w0", 10)  # w1 is there, and nothing takes it away


def test_forwards_may_run_among_the_updates_behind_the_norm():
    """Of a pair [BW_0, FW_1]: what each computes is what it computes alone, and memory is what fingers say."""
    arrays = (clipping(), clipping())
    schedule = undecided(arrays, 1 << 60)
    schedule.decisions[0].slots[6] = schedule.decisions[1].slots[7] = 2.0  # before u0, and u1: the other's z0 and z1
    verify_schedule(schedule)
    assert curve(schedule, ScheduleSegment(0, 1)) == (30, 32, 32, 34, 26, 26, 26 + 8, 36, 36, 34, 30)
    assert curve(schedule, ScheduleSegment(1, 0)) == (30, 32, 32, 34, 26, 26, 26, 24 + 8, 34, 34, 30)
    machine = Machine(schedule)
    for segment in [
        ScheduleSegment(None, 0),
        *[ScheduleSegment(0, 1), ScheduleSegment(1, 0)] * 2,
        ScheduleSegment(0, 1),
        ScheduleSegment(1, None),
    ]:
        machine.run(segment)
    for side, one in enumerate(arrays):
        operators, parameters = alone(one, side, 3)
        assert machine.seen[side] == operators
        assert {key: value for key, value in machine.parameters.items() if key[0] == side} == parameters
