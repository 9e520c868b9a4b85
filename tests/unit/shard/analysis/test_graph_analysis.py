"""Where a graph may be cut, and what is known of its nodes, against what running it shows."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune.errors import CaptureError
from hydra_tune.shard.analysis.graph_analysis import analyse
from hydra_tune.shard.analysis.random_ops import draws_random_numbers
from hydra_tune.shard.capture.step_capture import capture, state_specs
from hydra_tune.shard.verify.plan_check import verify
from tests.parity.models import MODELS
from tests.unit.shard.bench import bench, parity_bench, task_of, vectors


class Net(nn.Module):
    """A forward between two linear layers, given as a function, with a buffer at hand."""

    def __init__(self, middle):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))
        self.middle = middle

    def forward(self, x):
        return self.last(self.middle(self, self.first(x)))


def net(middle):
    return bench(task_of(Net(middle)))


def cut_between(made, before, after):
    """The cuts after the node of one operator and up to that of another."""
    return [cut for cut in made.analysis.cuts if made.position(before) < cut <= made.position(after)]


def test_a_tuple_must_not_cross():
    made = net(lambda self, x: torch.cat(torch.split(x, 4, dim=1)[::-1], dim=1))
    split = made.position("aten.split.Tensor")
    assert split + 1 not in made.analysis.cuts
    assert split in made.analysis.cuts
    assert made.position("aten.cat.default") in made.analysis.cuts


def test_a_view_and_its_base_are_not_parted_from_a_write_to_either():
    def middle(self, x):
        half = x[:, :4]
        other = x * 2
        half.mul_(3)
        return x + other

    made = net(middle)
    assert cut_between(made, "aten.slice.Tensor", "aten.mul_.Tensor") == []
    assert made.position("aten.add.Tensor") in made.analysis.cuts


def test_another_view_that_is_read_after_the_overwriting_is_not_parted_from_it():
    def middle(self, x):
        y = x.view(2, 16)
        x.mul_(3)
        return x + y.view(4, 8)

    made = net(middle)
    assert made.position("aten.mul_.Tensor") not in made.analysis.cuts
    assert made.position("aten.view.default") in made.analysis.cuts


def test_a_value_that_nobody_reads_after_its_overwriting_may_be_cut_from_it():
    made = net(lambda self, x: functional.relu(x, inplace=True))
    relu = made.position("aten.relu_.default")
    assert relu in made.analysis.cuts
    plan = made.plan(relu)
    assert plan.shards[1].graph.cloned == {made.captured.nodes[0].name}


def test_a_view_of_a_buffer_does_not_cross_the_buffers_overwriting():
    def middle(self, x):
        seen = self.seen.view(1)
        y = x + 1
        self.seen.add_(1)
        return y * seen

    made = net(middle)
    assert cut_between(made, "aten.view.default", "aten.add_.Tensor") == []


def test_a_batch_must_not_be_overwritten():
    model = nn.Linear(8, 8)

    def step(module, batch):
        x, y = batch
        x.mul_(2)
        return functional.mse_loss(module(x), y)

    with pytest.raises(CaptureError, match="overwrites its batch in place"):
        bench(task_of(model, step=step))


def test_overwritten_buffers_are_found_where_the_schema_says_so_and_where_it_does_not():
    def middle(self, x):
        self.seen.add_(1)
        return x

    model = nn.Sequential(
        Net(middle),
        nn.BatchNorm1d(8),
        nn.Unflatten(1, (2, 4)),
        nn.InstanceNorm1d(2, track_running_stats=True),
        nn.Flatten(),
    )
    made = bench(task_of(model))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()(vectors()[0])
    changed = {name for name, buffer in model.named_buffers() if not buffer.equal(before[name])}
    assert made.analysis.written_state == changed
    assert len(changed) == 6


def test_batch_norm_writes_nothing_in_evaluation():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    assert bench(task_of(model), mode="evaluate").analysis.written_state == set()


def test_a_buffer_overwritten_without_gradients_is_overwritten_all_the_same():
    """Export puts a `no_grad` block into a graph of its own."""

    def middle(self, x):
        with torch.no_grad():
            self.seen.copy_(torch.maximum(self.seen, x.abs().max()))
        return x / (1 + self.seen)

    assert net(middle).analysis.written_state == {"seen"}


def test_a_parameter_must_not_be_overwritten():
    model = nn.Sequential(nn.Embedding(9, 8, max_norm=0.5), nn.Linear(8, 8))
    batch = torch.arange(4), torch.zeros(4, 8)
    task = task_of(model)
    captured = capture(task, model, batch, "train")
    with pytest.raises(CaptureError, match=r"overwrites its parameter '0\.weight' in place"):
        analyse(captured, state_specs(model), batch)


@pytest.mark.parametrize("name", MODELS)
def test_nodes_are_called_stochastic_exactly_where_the_generator_moves(name):
    made = parity_bench(name)
    moved = moving_nodes(made)
    assert made.analysis.stochastic == moved
    assert bool(moved) == (name in ("mlp", "gpt2"))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.dropout(x, 0.0),
        lambda x: functional.dropout(x, 0.5, training=False),
        functional.dropout,
        lambda x: functional.dropout(x, 0.5, inplace=True),
        functional.alpha_dropout,
        lambda x: functional.feature_alpha_dropout(x[None])[0],
        lambda x: functional.dropout2d(x[None, None])[0, 0],
        functional.rrelu,
        lambda x: functional.rrelu(x, training=True),
        lambda x: x + torch.rand_like(x),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
        lambda x: x[torch.randperm(4)],
        functional.gumbel_softmax,
        lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None])[0],
        lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0],
        lambda x: no_grad_noise(x),  # noqa: PLW0108 - defined below
    ],
)
def test_each_operator_is_called_stochastic_if_it_moves_the_generator(function):
    made = net(lambda self, x: function(x))
    assert made.analysis.stochastic >= moving_nodes(made)
    if "dropout_" not in str([node.target for node in made.captured.nodes]):
        assert made.analysis.stochastic == moving_nodes(made)


def no_grad_noise(x):
    with torch.no_grad():
        noise = torch.randn_like(x)
    return x + noise


def moving_nodes(made):
    """Positions of the nodes that move the generator when the graph really runs."""
    moved = set()

    class Watch(torch.fx.Interpreter):
        def run_node(self, n):
            before = torch.get_rng_state()
            result = super().run_node(n)
            if not torch.equal(before, torch.get_rng_state()):
                moved.add(made.captured.nodes.index(n))
            return result

    state = [made.state[name] for name in made.captured.state.values()]
    inputs = [made.inputs[i] for i in made.captured.inputs.values()]
    with torch.random.fork_rng(devices=()):
        Watch(made.captured.module).run(*state, *made.captured.constants.values(), *inputs)
    return moved


def test_recurrent_layers_draw_only_with_dropout():
    def recurrent(dropout):
        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=dropout)

            def forward(self, x):
                return self.lstm(x[None])[0][0]

        return bench(task_of(Recurrent()))

    assert recurrent(0.0).analysis.stochastic == set()
    assert len(recurrent(0.5).analysis.stochastic) == 1


def test_what_crosses_is_counted_and_layers_are_named():
    made = bench(task_of(nn.Sequential(nn.Linear(8, 100), nn.Linear(100, 8))))
    assert made.analysis.crossing_bytes[:3] == [0, 4 * 100 * 4, 4 * 8 * 4]
    assert made.analysis.layers[:2] == ["0", "1"]
    assert made.analysis.layers[-1] == ""
    assert all(draws_random_numbers(node) is False for node in made.captured.nodes if "linear" in node.name)


def test_values_that_share_a_storage_are_known_to():
    made = net(lambda self, x: x.view(2, 16).view(4, 8))
    linear, view, again = (made.captured.nodes[i].name for i in range(3))
    values = made.analysis.values
    assert values[linear].storage == values[view].storage == values[again].storage
    assert values[linear].storage_bytes == 4 * 8 * 4
    assert values[linear].requires_grad


def test_the_loss_is_in_the_last_shard():
    """The backward begins there; what the step does after its loss stays with it."""
    model = nn.Linear(8, 8)
    model.register_buffer("steps", torch.zeros(()))

    def step(module, batch):
        loss = functional.mse_loss(module(batch[0]), batch[1])
        module.steps.add_(1)
        return loss

    made = bench(task_of(model, step=step))
    loss = made.position("aten.mse_loss.default")
    assert made.position("aten.add_.Tensor") > loss
    assert max(made.analysis.cuts) <= loss


def test_a_tensor_that_values_with_gradients_were_written_into_hands_gradients_back():
    """`new_zeros` requires none; after a write into a view of it, it does, and so does what crosses a cut behind."""

    def middle(self, x):
        canvas = x.new_zeros(x.shape)
        canvas[:, :4] = x[:, 4:]
        return canvas

    made = net(middle)
    canvas = str(made.captured.nodes[made.position("aten.new_zeros.default")])
    assert made.analysis.values[canvas].requires_grad
    cut = made.position("aten.linear.default", 1)
    assert cut in made.analysis.cuts
    plan = made.plan(cut)
    assert plan.shards[1].graph.live_in == (canvas,)
    verify(made.task, made.model, plan, made.batch)
