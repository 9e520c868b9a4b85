"""What the pilot says on fake tensors is what real units need, to the byte, seen by a tracker that shares nothing with it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune.shard.capture.step_capture import named_state
from hydra_tune.shard.cost.activation_policy import ActivationBudget, keeping
from hydra_tune.shard.cost.pilot import StorageTracker, aligned
from hydra_tune.shard.execute.chain import ShardChain, gradient_key
from hydra_tune.shard.verify.step_outcome import HostChainStore
from tests.parity.models import MODELS, build
from tests.support.tracker import Account, Mode
from tests.unit.shard.bench import bench, parity_bench, task_of, vectors

CUTS = (1, 2, 8)
NAMES = (*MODELS, "unet", "token", "lstm", "gru")


def in_turn(names, cuts):
    """Every model with every cut; in every run of the tests the cuts take turns."""
    return [
        pytest.param(name, cut, marks=[pytest.mark.slow] * (column != row % len(cuts)))
        for row, name in enumerate(names)
        for column, cut in enumerate(cuts)
    ]


class NoGenerator:
    """Memory does not depend on what is drawn."""

    def get_state(self):
        return torch.empty(0)

    def set_state(self, state):
        pass


class UNet(nn.Module):
    """Skips that are joined by `cat`, whose gradients are parts of one tensor."""

    def __init__(self):
        super().__init__()
        self.down, self.deep, self.up = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(32, 8)

    def forward(self, x):
        x = self.down(x)
        return self.up(torch.cat([x, functional.relu(self.deep(x))], dim=1))


class Token(nn.Module):
    """A parameter that every sample shares, expanded where a cut may be, and one that is used as a view."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 8))
        self.table = nn.Parameter(torch.ones(16, 8))
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        token = self.token.expand(len(x), -1)
        table = self.table[: len(x)]
        return self.last(self.first(x) + token) * table


class Recurrent(nn.Module):
    """Layers whose kernels keep a workspace that fake tensors do not have."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.recurrent, self.last = kind(4, 6, 2, batch_first=True, bidirectional=True), nn.Linear(12, 8)

    def forward(self, x):
        return self.last(self.recurrent(x.unflatten(1, (2, 4)))[0][:, -1])


@lru_cache  # a capture serves all the cuts that are tried
def made_bench(name):
    if name in MODELS:
        return parity_bench(name)
    return bench(
        task_of(
            {"unet": UNet, "token": Token, "lstm": Recurrent, "gru": partial(Recurrent, nn.GRU)}[name](), loss=squares
        ),
        vectors(),
    )


def squares(output, target):
    """Not `mse_loss`, whose real kernel keeps the storage of the unreduced loss under the reduced one."""
    return ((output - target) ** 2).mean()


@contextmanager
def quiet() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(chain, store, kind, index):
    """Bytes on the device at the peak of one unit: all it is given, and what it makes."""
    shard = chain.plan.shards[index].graph
    given = [*store.state(shard.state), *store.constants(shard.constants), *store.inputs(shard.inputs)]
    given += [store.values[key] for key in chain.keys(kind, index) if key in store.values]
    account = Account()
    account.follow(given)
    del given
    with Mode(account):
        getattr(chain, kind)(index, NoGenerator())
    return account.peak_bytes


def measured_units(made, plan):
    """`(kind, shard)` -> bytes, of one real step."""
    store = HostChainStore(dict(named_state(made.model)), plan.constants, made.inputs)
    chain, found = ShardChain(plan, store), {}
    with quiet():
        for index in range(len(plan.shards)):
            if chain.has_forward(index):
                found["forward", index] = measure(chain, store, "forward", index)
        for index in reversed(range(len(plan.shards))):
            if plan.mode == "train" and plan.shards[index].has_backward:
                found["backward", index] = measure(chain, store, "backward", index)
    return found


def piloted_units(plan):
    found = {}
    for index, shard in enumerate(plan.shards):
        if plan.mode != "train" or index < len(plan.shards) - 1:
            found["forward", index] = shard.cost.forward_bytes
        if plan.mode == "train" and shard.has_backward:
            found["backward", index] = shard.cost.backward_bytes
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "num_shards"), in_turn(NAMES, CUTS))
def test_the_peak_of_each_unit_is_piloted_to_the_byte(name, num_shards):
    made = made_bench(name)
    plan = made.plan(*made.spread(min(num_shards, len(made.analysis.cuts) + 1)))
    assert piloted_units(plan) == measured_units(made, plan)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "num_shards"), in_turn(NAMES[:-1], CUTS[1:]))
def test_what_is_kept_and_the_peaks_beside_it_are_piloted_to_the_byte(name, num_shards):
    made = made_bench(name)
    plan = made.plan(*made.spread(min(num_shards, len(made.analysis.cuts) + 1)))
    kept = keeping(plan, made.pilot, "keep", ActivationBudget(capacity_bytes=1 << 40, budget_bytes=1 << 40))
    assert [shard.keeps_activations for shard in kept.shards] == [
        *(shard.has_backward for shard in plan.shards[:-1]),
        False,
    ]
    expected = piloted_units(kept) | {
        ("backward", index): shard.cost.state_bytes
        + shard.cost.value_bytes
        + shard.cost.gradient_bytes
        + shard.cost.kept_bytes
        + shard.cost.backward_workspace
        for index, shard in enumerate(kept.shards)
        if shard.has_backward
    }
    assert measured_units(made, kept) == expected


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["cnn", "vit"])
def test_the_peak_of_an_evaluation_is_piloted_to_the_byte(name):
    made = bench(build(name, validate=build(name).train), mode="evaluate")
    plan = made.plan(*made.spread(3))
    with torch.no_grad():
        assert piloted_units(plan) == measured_units(made, plan)


@pytest.mark.cases(1 / 3)
def test_the_peak_of_an_evaluated_recurrent_layer_is_piloted_to_the_byte():
    model = Recurrent()
    made = bench(task_of(model, loss=squares, validate=lambda: [vectors()]), mode="evaluate")
    plan = made.plan(*made.spread(2))
    with torch.no_grad():
        assert piloted_units(plan) == measured_units(made, plan)


def test_a_weight_is_counted_once_though_a_kernel_reads_it_as_a_view():
    made = bench(task_of(nn.Sequential(nn.Linear(8, 1000, bias=False), nn.Linear(1000, 8, bias=False))))
    cost = made.plan(1).shards[0].cost
    assert cost.state_bytes == 8 * 1000 * 4
    assert cost.forward_workspace == 4 * 1000 * 4, "the output, and no second weight"


def test_gradients_handed_in_and_trained_parameters_are_counted():
    made = bench(task_of(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))))
    first, last = (shard.cost for shard in made.plan(1).shards)
    assert first.gradient_bytes == 4 * 8 * 4
    assert last.gradient_bytes == 0
    assert first.trained_bytes == last.trained_bytes == 256
    assert last.forward_workspace == 0, "the last shard has no forward unit"
    assert first.value_bytes == 4 * 8 * 4
    assert last.value_bytes == 2 * 4 * 8 * 4


def test_a_gradient_that_is_a_part_of_a_larger_tensor_is_counted_as_it_is_kept():
    """The backward of `cat` gives views of one tensor: who holds one of them holds all of it."""
    made = made_bench("unet")
    plan = made.plan(made.position("aten.linear.default", 1))
    store = HostChainStore(dict(named_state(made.model)), plan.constants, made.inputs)
    chain = ShardChain(plan, store)
    chain.forward(0, NoGenerator())
    chain.backward(1, NoGenerator())
    (gradient,) = [store.values[gradient_key(name)] for name in plan.shards[0].gradient_outputs]
    assert plan.shards[0].cost.gradient_bytes >= gradient.untyped_storage().nbytes()


def test_alignment_rounds_each_storage_up():
    assert [aligned(size, 64) for size in (0, 1, 64, 65)] == [0, 64, 64, 128]
    task = task_of(nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8)))
    exact, padded = (bench(task, alignment=alignment).plan(1).shards[0].cost for alignment in (1, 64))
    assert exact.state_bytes == 8 * 3 * 4 + 3 * 4
    assert padded.state_bytes == 128 + 64
    assert padded.forward_workspace == 64
    assert exact.forward_workspace == 48


def test_a_cost_is_the_most_of_its_units():
    made = parity_bench("vit")
    cost = made.pilot.cost(0, made.end)
    assert cost.peak_bytes == max(cost.forward_bytes, cost.backward_bytes, cost.update_bytes)
    assert made.pilot.cost(0, made.end) is cost, "measured once"


def test_a_pilot_leaves_the_model_and_its_data_alone():
    task = build("cnn")
    made = bench(task)
    before = {name: tensor.clone() for name, tensor in made.state.items()}
    state = torch.get_rng_state()
    made.pilot.cost(0, made.end)
    assert torch.get_rng_state().equal(state)
    assert all(tensor.equal(before[name]) for name, tensor in made.state.items())
    assert all(p.grad is None for p in made.model.parameters())


def test_the_pilots_tracker_counts_storages_from_first_sight_to_last_reference():
    tracker = StorageTracker(64)
    known = torch.zeros(100)
    with tracker:
        tracker.know(known)
        a = known.view(10, 10)
        assert tracker.current_bytes == 0
        b = a + 1
        c = b[2:]
        assert tracker.current_bytes == 448
        del b
        assert tracker.current_bytes == 448
        del c
        assert tracker.current_bytes == 0
    assert tracker.peak_bytes == 448


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_sparse_tensors_count_with_what_they_are_made_of(layout):
    dense = torch.eye(64)
    made = {
        "coo": dense.to_sparse,
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((1, 1)),
        "bsc": lambda: dense.to_sparse_bsc((1, 1)),
    }[layout]
    with StorageTracker() as tracker:
        sparse = made()
        held = tracker.current_bytes
        del sparse
        left = tracker.current_bytes
    ends = 0 if layout == "coo" else 65  # and the others' indices are a view of a "coo" tensor's, or not
    assert 8 * (64 + ends) + 4 * 64 <= held <= 8 * (2 * 64 + ends) + 4 * 64
    assert left == 0
