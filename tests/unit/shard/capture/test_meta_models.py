"""Models without bytes: what is built for real, what is not, and what is captured of them."""

import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hydra_tune.shard.capture.meta_models import (
    BuildLimitError,
    BuildLimitTracker,
    LargeTensorFakeMode,
    bodiless_twin,
    is_unbuilt,
    solid,
)
from hydra_tune.shard.partition.trial_step import twin_of

LARGE = 1024  # a square of that side is more than what is made for real


class Net(nn.Module):
    """A large layer, whose rate is read from a table; a tied weight, a buffer, and a tensor that nobody has registered."""

    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        self.first, self.last = nn.Linear(LARGE, LARGE), nn.Linear(LARGE, LARGE)
        self.last.weight = self.first.weight
        self.register_buffer("mask", torch.ones(LARGE, LARGE).tril())
        self.table = torch.ones(2, LARGE, LARGE)

    def forward(self, values):
        return self.last(self.first(values) * self.rates[1] + self.mask[0] + self.table[0, 0])


def unbuilt():
    with LargeTensorFakeMode():
        return Net()


def test_large_tensors_have_no_bytes_and_small_ones_have_values():
    model = unbuilt()
    assert is_unbuilt(model)
    assert model.rates == [0.0, 0.25, 0.5]
    found = {name: type(tensor) is FakeTensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    assert found == {"first.weight": True, "first.bias": False, "last.bias": False, "mask": True}
    assert float(model.first.bias.detach().abs().sum()) > 0
    assert isinstance(model.first.weight, nn.Parameter)
    assert model.last.weight is model.first.weight


def test_a_small_model_is_built_as_ever():
    torch.manual_seed(3)
    with LargeTensorFakeMode():
        model = nn.Linear(8, 8)
    torch.manual_seed(3)
    assert torch.equal(model.weight, nn.Linear(8, 8).weight)
    assert not is_unbuilt(model)


def test_a_twin_has_the_names_ties_and_attributes_and_is_in_one_mode():
    model = unbuilt()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        twin, doubles = bodiless_twin(model)
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert twin.last.weight is twin.first.weight is doubles[id(model.first.weight)]
    assert twin.rates == model.rates
    tensors = [*twin.parameters(), *twin.buffers(), twin.table]
    assert all(isinstance(tensor, FakeTensor) and tensor.fake_mode is mode for tensor in tensors)
    with mode:
        assert twin(torch.empty(4, LARGE)).shape == (4, LARGE)


@pytest.mark.parametrize("copied", [twin_of, lambda model: bodiless_twin(model)[0]], ids=["twin", "bodiless"])
def test_parameters_of_a_twin_have_copies_of_their_attributes(copied):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight.scales = [2.0]
    model[0].weight.owner = model[0]
    model[0].weight.lock = threading.Lock()
    model[1].running_mean.scale = 3.0
    twin = copied(model)
    assert twin[0].weight.scales == [2.0]
    assert twin[0].weight.scales is not model[0].weight.scales
    assert twin[0].weight.owner is twin[0]
    assert not hasattr(twin[0].weight, "lock"), "no copy can be made"
    assert twin[1].running_mean.scale == 3.0


def test_a_limit_ends_the_building_before_the_memory_is_there():
    made = []

    def build():
        for _ in range(100):
            try:
                made.append(torch.ones(LARGE, LARGE))
            except Exception:  # noqa: BLE001 - a factory that tries something else must not go on
                made.append(None)

    with pytest.raises(BuildLimitError), BuildLimitTracker(10 * 4 * LARGE * LARGE):
        build()
    assert len(made) == 10
    with pytest.raises(BuildLimitError), BuildLimitTracker(1 << 30):
        torch.empty(1 << 40)


def test_within_the_limit_nothing_is_different():
    torch.manual_seed(3)
    with BuildLimitTracker(1 << 30):
        model = Net()
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), Net().parameters(), strict=True))


def test_what_stands_for_a_constant_has_its_geometry():
    with FakeTensorMode():
        fake = torch.empty(6, 4).t()
    found = solid(fake)
    assert not isinstance(found, FakeTensor)
    assert (found.shape, found.stride()) == (fake.shape, fake.stride())
    real = torch.ones(3)
    assert solid(real) is real
