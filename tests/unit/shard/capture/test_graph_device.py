"""A captured graph runs where its operands are, though it was captured on the host."""

from functools import partial

import torch
from torch import fx, nn
from torch.nn import functional
from torch.optim import SGD

from hydra_tune import TrainTask
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.device import working_on
from hydra_tune.fusion.batching.batched_graph import StackedGraph
from hydra_tune.shard.capture.graph_device import on, placed
from hydra_tune.shard.partition.budget import ShardPlanConstraints
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.shard.partition.subgraph import compiled
from hydra_tune.train.rng.rng_streams import RandomStreams

BATCH = (torch.arange(20).view(4, 5) % 16, torch.arange(4))


class Makes(nn.Module):
    """Makes tensors, moves and converts them, and does so in a region of its own, too."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(16, 8), nn.Linear(8, 4)

    def forward(self, x):
        places = torch.arange(x.size(1), device=x.device)
        with torch.no_grad():
            shift = torch.ones(8, device=x.device) + torch.zeros(8).to(x.device)
        h = self.table(x) + self.table(places) + shift + torch.tensor([1.0] * 8, device=x.device)
        return self.linear(h.to(torch.float32)).mean(1)


def operands(graph, plan, model, place):
    state = dict(model.named_parameters())
    return [
        *(state[name].detach().to(place) for name in graph.state),
        *(plan.constants[name].to(place) for name in graph.constants),
        *(BATCH[index].to(place) for index in graph.inputs),
    ]


def batches():
    return [BATCH]


def prepared(kind=Makes, **changes):
    device = CpuDevice(0, 1 << 26)
    task = TrainTask(
        model=kind, optimizer=partial(SGD, lr=0.1), train=batches, loss=functional.cross_entropy, **changes
    )
    with RandomStreams(0).everything():
        model = task.model()
    library = PlanLibrary(ShardPlanConstraints(budget_bytes=1 << 26, buffer_fraction=0.0, alignment=64))
    plan = library.prepare(task, model, task.optimizer(list(model.parameters())), BATCH, "train").plan
    device.close()
    assert not plan.eager
    (shard,) = plan.shards
    return plan, shard.graph, model


def test_what_a_step_makes_is_made_where_its_operands_are():
    """The meta device stands for any that is not the host's: like a GPU, it refuses operands from elsewhere."""
    plan, graph, model = prepared()
    assert "cpu" in graph.code.code
    for place in ("cpu", "meta", "cpu"):
        (loss,) = graph.module(*operands(graph, plan, model, place))
        assert loss.device.type == place
    assert "device(type='meta')" not in graph.code.code, "the graph itself is as it was captured"


def test_so_is_what_stacked_members_make():
    plan, graph, model = prepared()
    stacked = StackedGraph(graph.code, [True] * len(graph.state) + [False] * len(graph.constants) + [True] * 2)
    for place in ("cpu", "meta"):
        tensors = operands(graph, plan, model, place)
        wide = [torch.stack([t, t]) for t in tensors]
        first, last = len(graph.state), len(graph.state) + len(graph.constants)
        (losses,) = stacked(*wide[:first], *tensors[first:last], *wide[last:])
        assert (losses.device.type, losses.shape) == (place, (2,))


def test_a_compiler_is_given_a_graph_for_each_device():
    plan, graph, model = prepared()
    torch._dynamo.reset()
    run = placed(graph.code, lambda one: compiled(one, "eager", ()))
    for place in ("cpu", "meta"):
        (loss,) = run(*operands(graph, plan, model, place))
        assert loss.device.type == place


def test_a_graph_without_operands_runs_where_the_worker_computes():
    """A shard of the first layer of a transformer may hold nothing but the positions of the tokens."""
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.arange.default, (5,), {"device": torch.device("cpu")}))
    run = placed(fx.GraphModule({}, graph))
    with working_on(torch.device("meta")):
        assert run().device.type == "meta"
    assert run().device.type == "cpu"


class Switches(nn.Module):
    """Switches autocast off for the device type of its input, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return self.linear(x.float())


def test_autocast_that_a_step_switches_off_is_off_on_another_device():
    _, graph, _ = prepared(Switches, precision="bfloat16")
    assert regions(graph.code) == [("cpu", torch.bfloat16, False)]
    assert regions(on(graph.code, torch.device("cuda", 0))) == [("cuda", torch.bfloat16, False)]
    assert regions(graph.code) == [("cpu", torch.bfloat16, False)], "the graph itself is as it was captured"


def regions(graph):
    return [n.args[:3] for n in graph.graph.nodes if n.target is torch.ops.higher_order.wrap_with_autocast]
