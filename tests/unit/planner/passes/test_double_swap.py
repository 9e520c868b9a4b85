"""A map that the backward uses twice is taken away between, where nothing else brings the peak down."""

import itertools
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.mutwo_least import least
from hydra_tune.planner.cost.peak_memory import curve, peak_of
from hydra_tune.planner.ir.aliasing import seen
from hydra_tune.planner.ir.lowering import lowered
from hydra_tune.planner.ir.plan_state import ScheduleSegment, undecided
from hydra_tune.planner.ir.verify import verify_schedule
from hydra_tune.planner.passes.candidates import candidates_of
from hydra_tune.planner.passes.double_swap import absence
from hydra_tune.planner.passes.graph_rewrite import rewritten
from hydra_tune.planner.passes.swap_recompute import AllowedPlanActions, planned
from hydra_tune.planner.profile.profiler import GraphMeasurements, array_of
from hydra_tune.planner.trace.step_graph import StepGraph
from tests.unit.planner.hand import array, op
from tests.unit.planner.machine import Machine, alone
from tests.unit.planner.made import EXAMPLES
from tests.unit.planner.run.test_planned_run import array as traced
from tests.unit.planner.run.test_planned_run import assert_same_as_unplanned, limited, tracked
from tests.unit.planner.test_random_plans import random_array

aten = torch.ops.aten
BACKWARD, FORWARD = ScheduleSegment(0, None), ScheduleSegment(None, 0)


def twice():
    """`a` of 10 bytes is used at `d` and `f`; `e` between them needs `b` of 20 and makes 5."""
    backward = [op("d", reads=["a"]), op("e", reads=["b"]), op("pause"), op("f", reads=["a", "e"])]
    made = array([op("a"), op("b"), op("end")], backward, {"a": 10, "b": 20, "e": 5}, copy={"a": 1.5, "b": 1.0})
    return replace(made, returning=frozenset(["a"]))


def told(schedule):
    return [(i.kind.value, i.storage or i.rank) for i in lowered(schedule, BACKWARD)]


def test_the_bound_is_that_of_the_operator_between_without_the_map():
    """`e` reads 20 and makes 5; with `a` there it would be 35."""
    assert (least(twice()).num_bytes, least(twice()).op) == (25, "e")
    assert least(replace(twice(), returning=frozenset())).num_bytes == 35


def test_it_goes_behind_one_use_and_comes_back_before_the_next():
    schedule = undecided((twice(),), 100)
    schedule.decisions[0].swaps.update(a=0, b=1)
    schedule.decisions[0].returns["a"] = {0: 2}
    assert told(schedule) == [
        ("prefetch", "a"), ("arrive", "a"), ("run", 0), ("prefetch", "b"), ("arrive", "b"), ("run", 1),
        ("prefetch", "a"), ("run", 2), ("arrive", "a"), ("run", 3),
    ]  # fmt: skip
    assert curve(schedule, BACKWARD) == (10, 10, 10, 20, 20, 25, 15, 15, 15, 15)
    verify_schedule(schedule)


@pytest.mark.parametrize(("limit", "expected"), [(35, {}), (34, {0: 2}), (25, {0: 2})])
def test_it_is_done_where_the_limit_asks_for_it_and_the_copy_begins_where_there_is_room(limit, expected):
    """1.5 seconds: the operator `pause` hides one of them, and before it `e` leaves no room."""
    schedule, _ = planned(undecided((twice(),), limit), AllowedPlanActions(recomputes=False))
    assert peak_of(schedule)[1].peak_bytes <= limit
    assert schedule.decisions[0].returns.get("a", {}) == expected


def test_what_the_backward_overwrites_or_recomputes_stays_from_its_first_use_to_its_last():
    schedule, _ = planned(
        undecided((replace(twice(), returning=frozenset()),), 34), AllowedPlanActions(recomputes=False)
    )
    assert peak_of(schedule)[1].peak_bytes == 35
    again = undecided((twice(),), 34)
    again.decisions[0].recomputes["a"] = candidates_of(twice(), 0)["a"]
    assert absence(again, 0, twice().maps["a"], 1) is None


def test_a_recomputation_from_it_is_a_use():
    """`c` is made of `a` again before rank 2: `a` is away until then, and until its use at rank 4."""
    forward = [op("a"), op("b"), op("c", reads=["a"]), op("end")]
    backward = [op("d", reads=["a"]), op("e"), op("f", reads=["c"]), op("g"), op("h", reads=["a"])]
    made = replace(array(forward, backward, {"a": 8, "c": 8}, copy={"a": 1.0}), returning=frozenset(["a"]))
    schedule = undecided((made,), 100)
    decided = schedule.decisions[0]
    decided.swaps["a"] = 0
    decided.recomputes["c"] = candidates_of(made, 0)["c"]
    assert absence(schedule, 0, made.maps["a"], 1) == (0, 2)
    assert absence(schedule, 0, made.maps["a"], 3) == (2, 4)
    assert absence(schedule, 0, made.maps["a"], 2) is None
    decided.returns["a"] = {0: 2, 2: 4}
    assert absence(schedule, 0, made.maps["a"], 3) is None
    verify_schedule(schedule)
    assert told(schedule)[2:] == [
        ("run", 0), ("run", 1), ("prefetch", "a"), ("arrive", "a"), ("recompute", "c"), ("run", 2),
        ("run", 3), ("prefetch", "a"), ("arrive", "a"), ("run", 4),
    ]  # fmt: skip


def returning(made):
    """All that the backward does not overwrite."""
    return replace(made, returning=frozenset(made.maps.keys() - made.backward_writes.keys()))


def test_random_steps_compute_the_same_and_none_is_below_the_bound():
    absences = 0
    for seed in range(60):
        random = Random(seed)
        arrays = tuple(returning(random_array(random)) for _ in range(random.randint(1, 2)))
        bound = max(one.static_bytes + least(one).num_bytes for one in arrays)
        schedule, _ = planned(
            undecided(arrays, bound), random.choice([AllowedPlanActions(), AllowedPlanActions(recomputes=False)])
        )
        assert peak_of(schedule)[1].peak_bytes >= bound
        verify_schedule(schedule)
        absences += sum(len(each) for one in schedule.decisions for each in one.returns.values())
        machine = Machine(schedule)
        order = (
            [FORWARD, BACKWARD]
            if len(arrays) == 1
            else [FORWARD, ScheduleSegment(0, 1), ScheduleSegment(1, 0), BACKWARD]
        )
        for segment in order:
            machine.run(segment)
        for side, one in enumerate(arrays):
            steps = 2 if len(arrays) == 2 and not side else 1
            assert machine.seen[side] == alone(one, side, steps)[0]
    assert absences > 10


def all_away(name, share):
    """A plan by swaps alone of which every map is away between any two uses that are not next to each other."""
    schedule = limited((name, name), share, AllowedPlanActions(recomputes=False))
    for own, decided in zip(schedule.arrays, schedule.decisions, strict=True):
        for one in decided.swaps.keys() & own.returning:
            uses = own.backward_ranks[one]
            away = {last: (last + need) // 2 + 1 for last, need in itertools.pairwise(uses) if need - last > 1}
            decided.returns |= {one: away} if away else {}
    assert all(one.returns for one in schedule.decisions)
    return schedule


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("name", ["dlrm", pytest.param("resnet", marks=pytest.mark.slow)])
def test_traced_steps_have_the_same_bits_wherever_maps_are_away_and_their_views_made_anew(name):
    schedule = all_away(name, 0.3)
    verify_schedule(schedule)
    assert_same_as_unplanned(schedule, (name, name))
    measured, predicted = tracked(schedule, (name, name))
    assert 0.9 * predicted <= measured <= predicted


class Bottlenecks(nn.Module):
    """Narrow convolutions between wide maps, with shortcuts."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 1, bias=False), nn.Linear(16, 4)
        self.down = nn.ModuleList(nn.Conv2d(16, 2, 1, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Conv2d(2, 16, 1, bias=False) for _ in range(3))

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for down, up in zip(self.down, self.up, strict=True):
            x = torch.relu(x + up(torch.relu(down(x))))
        return self.head(x.mean((2, 3)))


@pytest.mark.slow
def test_bottlenecks_are_planned_within_a_bound_below_what_maps_need_that_stay(monkeypatch):
    """Two gradients and their sum at a shortcut, and not the rectifier's map beside them."""
    name = "bottlenecks"
    monkeypatch.setitem(EXAMPLES, name, (Bottlenecks, EXAMPLES["cnn"][1]))
    made = traced(name)
    bound = least(made)
    assert bound.num_bytes < least(replace(made, returning=frozenset())).num_bytes
    schedule, _ = planned(undecided((made,), made.static_bytes + bound.num_bytes), AllowedPlanActions(recomputes=False))
    assert schedule.decisions[0].returns
    assert peak_of(schedule)[1].peak_bytes == schedule.limit_bytes
    assert_same_as_unplanned(schedule, (name,), (3,))


def test_what_need_not_be_away_stays():
    schedule = undecided((twice(),), 35)
    schedule.decisions[0].swaps.update(a=0, b=1)
    schedule.decisions[0].returns["a"] = {0: 2}
    found, _ = planned(schedule)
    assert not any(found.decisions[0].returns.values())
    assert schedule.decisions[0].returns == {"a": {0: 2}}


def transposed_twice():
    """A rectifier whose map the backward transposes once and uses twice."""
    graph, mode = fx.Graph(), FakeTensorMode()
    with mode:
        geometry = {"x": torch.empty(4, 4)}
    x = graph.placeholder("x")

    def call(name, target, *args):
        return graph.create_node("call_function", target, args, name=name)

    r = call("r", aten.relu.default, x)
    loss = call("loss", aten.sum.default, r)
    rt = call("rt", aten.t.default, r)
    d = call("d", aten.mul.Tensor, rt, x)
    e = call("e", aten.neg.default, d)
    call("f", aten.mul.Tensor, rt, e)
    graph.output((loss,))
    owner = fx.GraphModule({}, fx.Graph())
    return StepGraph(
        graph=graph, owner=owner, num_forward=2, geometry=geometry, inputs=("x",), state={}, constants=(), moments={}, rates={},
        noise=(), seen=seen(graph, owner, geometry, [], mode),
    )  # fmt: skip


def test_a_view_of_what_has_come_back_again_is_made_anew():
    made = transposed_twice()
    own = array_of("", made, GraphMeasurements(out_seconds={"r": 1.0}, in_seconds={"r": 1.0}))
    assert own.returning == {"r", "loss"}
    schedule = undecided((own,), 1000)
    schedule.decisions[0].swaps["r"] = 0
    schedule.decisions[0].returns["r"] = {1: 3}
    text = rewritten(schedule, [made])[BACKWARD].text()
    assert (
        text
        == """\
a0_r_on_host = argument
a0_x = argument
prefetch = prefetch(a0_r_on_host)
arrived = arrived(prefetch)
view_of = view_of(arrived, torch.float32, [4, 4], [4, 1], 0)
a0_rt = aten.t.default(view_of)
a0_d = aten.mul.Tensor(a0_rt, a0_x)
a0_e = aten.neg.default(a0_d)
prefetch_1 = prefetch(a0_r_on_host)
arrived_1 = arrived(prefetch_1)
view_of_1 = view_of(arrived_1, torch.float32, [4, 4], [1, 4], 0)
a0_f = aten.mul.Tensor(view_of_1, a0_e)
return \n"""
    )
