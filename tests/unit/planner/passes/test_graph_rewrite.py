"""Merged graphs say all that happens, in order: golden texts of a small step with each kind of decision."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hydra_tune.planner.ir import planner_ops
from hydra_tune.planner.ir.aliasing import seen
from hydra_tune.planner.ir.plan_state import ScheduleSegment, undecided
from hydra_tune.planner.ir.verify import verify_graph
from hydra_tune.planner.passes.candidates import candidates_of
from hydra_tune.planner.passes.graph_rewrite import rewritten
from hydra_tune.planner.profile.profiler import GraphMeasurements, array_of
from hydra_tune.planner.trace.step_graph import StepGraph

aten = torch.ops.aten


def step():
    """Two products with a rectifier and noise between, their gradients and updates, as a graph written by hand."""
    graph, mode = fx.Graph(), FakeTensorMode()
    with mode:
        geometry = {"x": torch.empty(4, 4), "v": torch.empty(4, 4), "w": torch.empty(4, 4)}
        drawn = [torch.empty(4, 4)]
    x, v, w = (graph.placeholder(name) for name in geometry)

    def call(name, target, *args):
        return graph.create_node("call_function", target, args, name=name)

    h = call("h", aten.mm.default, x, v)
    r = call("r", aten.relu.default, h)
    mask = call("mask", planner_ops.draw, 0)
    n = call("n", aten.mul.Tensor, r, mask)
    y = call("y", aten.mm.default, n, w)
    loss = call("loss", aten.sum.default, y)
    g = call("g", aten.ones_like.default, x)
    nt = call("nt", aten.t.default, n)
    dw = call("dw", aten.mm.default, nt, g)
    wt = call("wt", aten.t.default, w)
    dn = call("dn", aten.mm.default, g, wt)
    call("uw", aten.sub_.Tensor, w, dw)
    dr = call("dr", aten.mul.Tensor, dn, mask)
    dh = call("dh", aten.threshold_backward.default, dr, r, 0)
    xt = call("xt", aten.t.default, x)
    dv = call("dv", aten.mm.default, xt, dh)
    call("uv", aten.sub_.Tensor, v, dv)
    graph.output((loss,))
    owner = fx.GraphModule({}, fx.Graph())
    return StepGraph(
        graph=graph, owner=owner, num_forward=6, geometry=geometry, inputs=("x",), state={"v": "v", "w": "w"},
        constants=(), moments={}, rates={}, noise=(), seen=seen(graph, owner, geometry, drawn, mode),
    )  # fmt: skip


def schedule(*, swaps=(), recomputes=(), slots=None):
    made = step()
    names = [node.name for node in made.ops]
    profile = GraphMeasurements(
        dict.fromkeys(names, 1.0), {}, dict.fromkeys(["r", "n", "mask"], 1.0), dict.fromkeys(["r", "n", "mask"], 1.0)
    )
    arrays = tuple(array_of(f"a{side}", made, profile) for side in range(2))
    found = undecided(arrays, 10_000)
    for side, decisions in enumerate(found.decisions):
        candidates = candidates_of(arrays[side], side)
        decisions.swaps.update(swaps)
        decisions.recomputes.update({name: candidates[name] for name in recomputes})
        decisions.slots.update(slots or {})
    return found, [made, made]


FIRST = ScheduleSegment(0, 1)
FORWARD = """\
a1_h = aten.mm.default(a1_x, a1_v)
a1_r = aten.relu.default(a1_h)
a1_mask = draw(0)
a1_n = aten.mul.Tensor(a1_r, a1_mask)
{after_n}a1_y = aten.mm.default(a1_n, a1_w)
{after_y}a1_loss = aten.sum.default(a1_y)
"""


def text(found, segment=FIRST):
    merged = rewritten(*found)
    for one in merged.values():
        verify_graph(one.graph)
    return merged[segment].text()


def body(found, segment=FIRST):
    return "".join(line for line in text(found, segment).splitlines(keepends=True) if " = argument" not in line)


def test_nothing_decided():
    assert text(schedule()) == (
        "a0_x = argument\na0_n = argument\na0_w = argument\na0_mask = argument\na0_r = argument\na0_v = argument\n"
        "a1_x = argument\na1_v = argument\na1_w = argument\n"
        """\
a0_g = aten.ones_like.default(a0_x)
a0_nt = aten.t.default(a0_n)
a0_dw = aten.mm.default(a0_nt, a0_g)
a0_wt = aten.t.default(a0_w)
a0_dn = aten.mm.default(a0_g, a0_wt)
a0_uw = aten.sub_.Tensor(a0_w, a0_dw)
a0_dr = aten.mul.Tensor(a0_dn, a0_mask)
a0_dh = aten.threshold_backward.default(a0_dr, a0_r, 0)
a0_xt = aten.t.default(a0_x)
a0_dv = aten.mm.default(a0_xt, a0_dh)
a0_uv = aten.sub_.Tensor(a0_v, a0_dv)
""" + FORWARD.format(after_n="", after_y="") + "return a1_loss, a1_n, a1_mask, a1_r\n"
    )


def test_a_swapped_map_goes_to_the_host_comes_back_behind_forward_operators_and_is_viewed_anew():
    found = body(schedule(swaps={"r": 6}, slots={7: 2.0}))
    assert found == (
        """\
a0_g = aten.ones_like.default(a0_x)
a0_nt = aten.t.default(a0_n)
a0_dw = aten.mm.default(a0_nt, a0_g)
a0_wt = aten.t.default(a0_w)
a0_dn = aten.mm.default(a0_g, a0_wt)
a0_uw = aten.sub_.Tensor(a0_w, a0_dw)
prefetch = prefetch(a0_r_on_host)
a0_dr = aten.mul.Tensor(a0_dn, a0_mask)
a1_h = aten.mm.default(a1_x, a1_v)
a1_r = aten.relu.default(a1_h)
arrived = arrived(prefetch)
view_of = view_of(arrived, torch.float32, [4, 4], [4, 1], 0)
a0_dh = aten.threshold_backward.default(a0_dr, view_of, 0)
a0_xt = aten.t.default(a0_x)
a0_dv = aten.mm.default(a0_xt, a0_dh)
a0_uv = aten.sub_.Tensor(a0_v, a0_dv)
a1_mask = draw(0)
a1_n = aten.mul.Tensor(a1_r, a1_mask)
offload = offload(a1_r, 'a1_r')
a1_y = aten.mm.default(a1_n, a1_w)
release = release(offload)
a1_loss = aten.sum.default(a1_y)
return a1_loss, a1_n, a1_mask, release
"""
    )


def test_a_recomputed_map_is_deleted_and_made_again_of_what_was_kept():
    found = body(schedule(recomputes=["n"]))
    assert found.startswith(
        "a0_g = aten.ones_like.default(a0_x)\na0_n_for_n = aten.mul.Tensor(a0_r, a0_mask)\na0_nt = aten.t.default(a0_n_for_n)\n"
    )
    assert FORWARD.format(after_n="", after_y="delete = delete(a1_n)\n") in found
    assert found.endswith("return a1_loss, a1_r, a1_mask\n")


def test_a_swapped_source_comes_back_before_what_is_recomputed_of_it():
    found = body(schedule(swaps={"mask": 6}, recomputes=["n"]))
    order = [found.index(part) for part in ("= prefetch(", "= arrived(", "a0_n_for_n = aten.mul.Tensor(a0_r, view_of)")]
    assert order == sorted(order)
    assert found.count("draw(0)") == 1


def test_what_pairs_begin_and_end_with_is_there():
    found = rewritten(*schedule(swaps={"r": 6}))
    assert found.keys() == {
        ScheduleSegment(0, 1),
        ScheduleSegment(1, 0),
        *(ScheduleSegment(s, None) for s in (0, 1)),
        *(ScheduleSegment(None, s) for s in (0, 1)),
    }
    assert found[ScheduleSegment(None, 0)].outputs == ("a0_losses", "a0_n", "a0_mask", "a0_r_on_host")


@pytest.mark.parametrize("spoil", ["twice", "late"])
def test_graphs_that_use_what_has_left_are_found(spoil):
    merged = rewritten(*schedule(swaps={"r": 6}))[ScheduleSegment(0, 1)]
    graph = merged.graph
    (offload,) = (node for node in graph.nodes if node.target is planner_ops.offload)
    (end,) = (node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(end):
        if spoil == "twice":
            graph.call_function(planner_ops.release, (offload,))
        else:
            graph.call_function(aten.relu.default, (offload.args[0],))
    with pytest.raises(AssertionError):
        verify_graph(graph)


def test_nodes_are_not_functions_to_call():
    for target in (
        planner_ops.draw,
        planner_ops.release,
        planner_ops.prefetch,
        planner_ops.arrived,
        planner_ops.delete,
    ):
        with pytest.raises(AssertionError, match="interpreter"):
            target(0)
    with pytest.raises(AssertionError, match="interpreter"):
        planner_ops.offload(torch.zeros(1), "a")
