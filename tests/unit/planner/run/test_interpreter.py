"""Algorithm H on a graph made by hand: what is moved, recomputed and deleted, in the order of its nodes, and what comes out."""

import weakref

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_tune.planner.ir import planner_ops
from hydra_tune.planner.ir.plan_state import ScheduleSegment
from hydra_tune.planner.passes.graph_rewrite import MergedGraph
from hydra_tune.planner.run.copy_engine import ThreadCopyEngine
from hydra_tune.planner.run.interpreter import MergedGraphInterpreter

aten = torch.ops.aten
CPU = torch.device("cpu")
OPERATORS = {"neg", "mul", "add", "relu", "exp", "sum"}


class Told(ThreadCopyEngine):
    """Copies that say when they are asked for."""

    def __init__(self, sizes, log):
        super().__init__(sizes)
        self._log = log

    def offload(self, value, storage):
        self._log.append(f"offload {storage}")
        return super().offload(value, storage)

    def release(self, handle):
        self._log.append("release")
        return super().release(handle)

    def prefetch(self, copy):
        self._log.append("prefetch")
        return super().prefetch(copy)

    def arrived(self, handle):
        self._log.append("arrived")
        return super().arrived(handle)


class Operators(TorchDispatchMode):
    """Notes the operators of the graph as they run, and when what an exponential is made of is there no more."""

    def __init__(self, log):
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in OPERATORS:
            self._log.append(name)
        made = func(*args, **(kwargs or {}))
        if name == "mul" and len(args[0]) == 2 and "relu" in self._log:
            weakref.finalize(made, self._log.append, "product is gone")
        return made


def merged():
    """A backward whose map `h` was swapped and whose `m` is recomputed; a forward that swaps `r` and deletes `m`."""
    graph = fx.Graph()
    x, on_host = graph.placeholder("a0_x"), graph.placeholder("a0_h_on_host")
    y = graph.placeholder("a1_x")

    def call(target, *args):
        return graph.call_function(target, args)

    coming = call(planner_ops.prefetch, on_host)
    hides = call(aten.neg.default, x)
    again = call(aten.mul.Tensor, x, 3.0)
    h = call(planner_ops.view_of, call(planner_ops.arrived, coming), torch.float32, [2, 2], [2, 1], 0)
    gradient = call(aten.add.Tensor, call(aten.add.Tensor, h, again), hides)
    r = call(aten.relu.default, y)
    leaving = call(planner_ops.offload, r, "a1_r")
    m = call(aten.mul.Tensor, y, 3.0)
    e = call(aten.neg.default, call(aten.exp.default, m))
    call(planner_ops.delete, m)
    loss = call(aten.sum.default, e)
    gone = call(planner_ops.release, leaving)
    graph.output((gradient, loss, gone))
    outputs = ("gradient", "a1_losses", "a1_r_on_host")
    return MergedGraph(segment=ScheduleSegment(0, 1), graph=graph, outputs=outputs, owner=nn.Module())


def no_draws(side, number):
    raise AssertionError(f"nothing draws, and {side}, {number} was asked for")


@pytest.fixture
def run():
    log = []
    copies = Told({"a1_r": 16}, log)
    x, y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[-1.0, 2.0], [0.5, -3.0]])
    h = torch.tensor([[10.0, 20.0], [30.0, 40.0]])
    given = {"a0_x": x, "a0_h_on_host": h.view(-1).view(torch.uint8), "a1_x": y}
    try:
        with Operators(log):
            found = MergedGraphInterpreter(merged(), copies, no_draws, CPU).run(given)
    finally:
        copies.close()
    return found, log, (x, y, h)


def test_all_is_done_in_the_order_of_the_nodes(run):
    _, log, _ = run
    assert log == [
        "prefetch", "neg", "mul", "arrived", "add", "add",
        "relu", "offload a1_r", "mul", "exp", "neg", "product is gone", "sum", "release",
    ]  # fmt: skip


def test_values_are_those_of_the_operators_alone(run):
    found, _, (x, y, h) = run
    assert torch.equal(found["gradient"], h + x * 3.0 + -x)
    assert torch.equal(found["a1_losses"], (-(y * 3.0).exp()).sum())
    assert torch.equal(found["a1_r_on_host"].view(torch.float32).view(2, 2), y.relu())


def test_what_it_is_given_is_taken_out_of_the_callers_hands():
    graph = MergedGraphInterpreter(merged(), Told({"a1_r": 16}, []), no_draws, CPU)
    assert graph.arguments == ["a0_x", "a0_h_on_host", "a1_x"]
    given = {name: torch.ones(2, 2) for name in graph.arguments} | {"a0_h_on_host": torch.zeros(16, dtype=torch.uint8)}
    seen = weakref.ref(given["a0_h_on_host"])
    graph.run(given)
    graph._copies.close()
    assert given == {}
    assert seen() is None


class Doubled(nn.Module):
    """Has a constant."""

    def __init__(self, place):
        super().__init__()
        self.register_buffer("two", torch.full((2,), 2.0, device=place))


def test_what_a_graph_traced_for_another_device_makes_is_where_it_runs():
    """Of its kind; here there is no other device of the CPU's kind, and one whose tensors have no bytes stands for it."""
    graph = fx.Graph()
    x, two = graph.placeholder("a0_x"), graph.get_attr("two")
    ones = graph.call_function(aten.full.default, ([2], 1.0), {"device": torch.device("meta")})
    graph.output((graph.call_function(aten.add.Tensor, (graph.call_function(aten.mul.Tensor, (x, two)), ones)),))
    made = MergedGraph(segment=ScheduleSegment(None, 0), graph=graph, outputs=("a0_losses",), owner=Doubled("cpu"))
    copies = ThreadCopyEngine({})
    found = MergedGraphInterpreter(made, copies, no_draws, CPU).run({"a0_x": torch.tensor([3.0, 4.0])})
    there = MergedGraphInterpreter(made, copies, no_draws, torch.device("meta")).run(
        {"a0_x": torch.empty(2, device="meta")}
    )
    copies.close()
    assert found["a0_losses"].tolist() == [7.0, 9.0]
    assert there["a0_losses"].device.type == "meta"
