"""Operators with a stacked form of their own, or with none, are on stacked members what they are for each of them alone."""

from functools import partial

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from hydra_tune.fusion.batching.batched_graph import StackedGraph
from tests.unit.fusion.compile.test_batched_plan import compare
from tests.unit.shard.bench import bench, task_of

_GENERATOR = torch.Generator().manual_seed(3)
VECTORS = torch.randn(6, 8, generator=_GENERATOR, dtype=torch.float64)
MOMENTS = torch.randn(6, 3, 8, generator=_GENERATOR, dtype=torch.float64)
IDS = torch.randint(7, (6, 5), generator=_GENERATOR)
CLASSES = torch.randint(3, (6,), generator=_GENERATOR)
IMAGES = torch.randn(6, 2, 4, 5, generator=_GENERATOR, dtype=torch.float64)


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.recurrent, self.head = kind(8, 6, batch_first=True, **options), nn.LazyLinear(3)

    def forward(self, x):
        outputs, state = self.recurrent(x)
        last = state[1] if isinstance(state, tuple) else state
        return self.head(torch.cat([outputs[:, 0], last[-1]], 1))


class Bag(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(7, 6, **options), nn.Linear(6, 3)

    def forward(self, ids):
        if self.bag.include_last_offset:
            offsets = torch.arange(0, ids.numel() + 1, ids.shape[1])
            return self.head(self.bag(ids.flatten(), offsets))
        weights = (
            torch.linspace(1, 2, ids.numel(), dtype=torch.float64).view_as(ids) if self.bag.mode == "sum" else None
        )
        return self.head(self.bag(ids, per_sample_weights=weights))


class Table(nn.Module):
    """A row of padding, which has no gradient."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 6, padding_idx=2), nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(self.table(ids).mean(1))


class Noise(nn.Module):
    """Numbers drawn in a region without gradients, in a matrix that lies transposed, and by operators of one piece."""

    def __init__(self):
        super().__init__()
        self.first, self.slope, self.head = nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 3)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        y = self.first(x)
        with torch.no_grad():
            self.average.lerp_(y.mean(0), 0.1)
            noise = torch.randn_like(y) + torch.randn_like(self.average)
        y = functional.dropout(self.slope(y + 0.1 * noise).T, 0.4).T
        return self.head(torch.native_dropout(y + self.average, 0.3, True)[0])


class Canvas(nn.Module):
    """Something made of nothing, and then written into."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        canvas = x.new_zeros(len(x), 8)
        canvas[:, :4] += self.first(x)[:, :4]
        return self.head(canvas)


class Generator(nn.Module):
    """Images made of vectors, whose normalization lays gradients out otherwise than traced."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 24), nn.BatchNorm2d(2), nn.Linear(24, 3)

    def forward(self, x):
        images = self.norm(self.first(x).view(-1, 2, 3, 4))
        return self.head(torch.zeros_like(images).flatten(1)) + images.sin().mean()


def check(module, inputs, *, is_traced, loss=functional.cross_entropy):
    task = task_of(module.double(), train=lambda: [(inputs, CLASSES)], loss=loss)
    compare(bench(task), is_traced=is_traced)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "options",
    [
        {"kind": nn.GRU, "num_layers": 2, "bidirectional": True, "dropout": 0.3},
        pytest.param({"kind": nn.LSTM, "num_layers": 2, "bidirectional": True, "dropout": 0.3}, marks=pytest.mark.slow),
        {"kind": nn.LSTM, "bias": False},
        {"kind": nn.RNN, "num_layers": 2, "dropout": 1.0},
        {"kind": nn.RNN, "nonlinearity": "relu"},
    ],
    ids=lambda options: " ".join(str(getattr(value, "__name__", value)) for value in options.values()),
)
def test_recurrent_layers(options):
    module = Recurrent(**options)
    module(MOMENTS.float())
    check(module, MOMENTS, is_traced=True)


def test_a_projected_lstm():
    class Projected(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent, self.head = nn.LSTM(8, 6, proj_size=3), nn.Linear(3, 3)

        def forward(self, x):
            return self.head(self.recurrent(x.transpose(0, 1))[0][-1])

    check(Projected(), MOMENTS, is_traced=False)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sum"},
        {"mode": "mean"},
        {"mode": "max"},
        {"padding_idx": 1},
        {"include_last_offset": True},
        {"scale_grad_by_freq": True},
    ],
    ids=str,
)
def test_bags(options):
    check(Bag(**options), IDS, is_traced=True)


def test_a_row_of_padding():
    check(Table(), IDS, is_traced=True)


def test_columns_that_are_filled_are_each_members_own():
    graph = fx.Graph()
    x, index = graph.placeholder("x"), graph.placeholder("index")
    graph.output((graph.call_function(torch.ops.aten.index_fill.int_Scalar, (x, 1, index, 0.5)),))
    stacked = StackedGraph(fx.GraphModule({}, graph), [True, True])
    values, indices = torch.stack([VECTORS, -VECTORS]), torch.tensor([[-1, 2], [0, -3]])
    (filled,) = stacked(values, indices)
    for row, value, own in zip(filled, values, indices, strict=True):
        torch.testing.assert_close(row, value.index_fill(1, own, 0.5), rtol=0, atol=0)


def test_a_number_of_a_wider_dtype_leaves_the_dtype_of_the_result():
    graph = make_fx(lambda x, least: (torch.where(x > least, x, least),), tracing_mode="fake")
    values, least = VECTORS[:2].float(), torch.tensor([0.25, -0.25], dtype=torch.float64)
    (found,) = StackedGraph(graph(values[0], least[0]), [True, True])(values, least)
    expected = torch.stack([torch.where(x > number, x, number) for x, number in zip(values, least, strict=True)])
    assert expected.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "shapes",
    [
        ((5, 4), (4,)),
        ((2, 5, 4), (4,)),
        ((2, 4), (6, 4), ()),
        ((5, 4), (6, 4), (5, 6)),
        ((2, 5, 4), (6, 4), (2, 5, 6)),
        ((5, 0), (6, 0), (6,)),
    ],
    ids=str,
)
def test_odd_shapes_of_a_linear_layer_are_each_members_own(shapes):
    """A head that is one vector, a bias that is one number or a matrix, and no inputs at all."""
    graph = fx.Graph()
    places = tuple(graph.placeholder(f"x{index}") for index in range(len(shapes)))
    graph.output((graph.call_function(torch.ops.aten.linear.default, places),))
    members = [[torch.randn(shape, generator=_GENERATOR, dtype=torch.float64) for shape in shapes] for _ in range(2)]
    stacked = StackedGraph(fx.GraphModule({}, graph), [True] * len(shapes))
    (found,) = stacked(*(torch.stack(tensors) for tensors in zip(*members, strict=True)))
    torch.testing.assert_close(found, torch.stack([functional.linear(*own) for own in members]), rtol=1e-12, atol=1e-14)


def test_a_head_that_is_one_vector():
    class Vector(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(8, 8), nn.Parameter(torch.linspace(-1, 1, 8))

        def forward(self, x):
            return functional.linear(self.first(x).tanh(), self.head)

    check(Vector(), VECTORS, is_traced=True, loss=lambda out, classes: functional.mse_loss(out, classes.double()))


@pytest.mark.parametrize("is_traced", [False, True])
def test_images_made_of_vectors(is_traced):
    check(Generator(), VECTORS, is_traced=is_traced)


def test_noise():
    check(Noise(), VECTORS, is_traced=False)


@pytest.mark.parametrize(
    "draw",
    [
        torch.randn_like,
        torch.rand_like,
        partial(torch.randint_like, high=9),
        lambda h: torch.randn_like(h.transpose(1, 3)).transpose(1, 3),
        lambda h: torch.randn_like(h[:, :, :1].expand_as(h)),
    ],
    ids=["normal", "uniform", "integers", "transposed", "expanded"],
)
def test_noise_that_lies_as_the_output_of_a_convolution(draw):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Conv2d(2, 4, 3), nn.Linear(24, 3)

        def forward(self, x):
            h = self.first(x)
            return self.head((h + 0.1 * draw(h.detach())).flatten(1))

    check(Noisy(), IMAGES, is_traced=False)


def test_a_factor_that_is_overwritten_behind_its_product():
    class Overwriting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.fixed, self.head = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)
            self.fixed.weight.requires_grad_(False)  # the backward reads no factor of this product

        def forward(self, x):
            y = self.first(x)
            product = self.fixed(y)
            y.add_(1.0)
            return self.head(y) * product.transpose(0, 1).mean(0).unsqueeze(1)

    check(Overwriting(), VECTORS, is_traced=True)


def test_what_is_written_into():
    check(Canvas(), VECTORS, is_traced=True)


def test_a_loss_that_has_no_stacked_form():
    check(nn.Linear(8, 3), VECTORS, is_traced=False, loss=partial(functional.multi_margin_loss, p=2))
