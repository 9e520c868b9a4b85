"""What comes out of the pool is the user's own model, and loads where a plain one does."""

from functools import lru_cache

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.parity.observe import reference_of, run
from tests.parity.registry import ENTRIES, Spec

NAMES = ("gpt2", "hf_gpt2", "weight_norm", "spectral_norm", "moving_average", "shared_module")
LARGE = {"gpt2", "hf_gpt2"}  # take most of the time; shared_module has a tied parameter as well
EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in NAMES]
SPECS = {name: Spec(name, "evaluation") for name in NAMES}
TIED = {
    "gpt2": ("tokens.weight", "head.weight"),
    "hf_gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "shared_module": ("shared.weight", "also_shared.weight"),
}


@lru_cache
def trained(*names):
    """Results and references."""
    specs = [SPECS[name] for name in names]
    seen = run(specs, devices="cpu:2", device_memory="64MiB", num_shards=3)
    return {name: one.result for name, one in zip(names, seen, strict=True)}, reference_of(specs)


@pytest.fixture
def together(name):
    """A test's model is trained beside the others of its size."""
    return trained(*(other for other in NAMES if (other in LARGE) == (name in LARGE)))


@pytest.fixture
def results(together):
    return together[0]


@pytest.fixture
def references(together):
    return together[1]


@pytest.mark.parametrize("name", EACH)
def test_the_state_dict_loads_into_a_plain_model_of_the_same_class(results, references, name):
    trained = results[name].module()
    plain = ENTRIES[name].model()
    assert type(trained) is type(plain)
    assert [type(part) for part in trained.modules()] == [type(part) for part in plain.modules()] or name in (
        "weight_norm",
        "spectral_norm",
    )
    state = results[name].state_dict()
    assert list(state) == list(plain.state_dict())
    assert plain.load_state_dict(state, strict=True).missing_keys == []
    for key, tensor in references[SPECS[name]]["state"].items():
        assert torch.equal(plain.state_dict()[key], tensor), key


@pytest.mark.parametrize(
    ("name", "aliases"), [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] in LARGE)) for case in TIED.items()]
)
def test_tied_names_are_one_parameter_still(results, name, aliases):
    module, state = results[name].module(), results[name].state_dict()
    first, second = (module.get_parameter(alias) for alias in aliases)
    assert first is second
    assert all(state[alias].data_ptr() == first.data_ptr() for alias in aliases)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_parametrizations_are_in_place_and_can_be_taken_off(results, name):
    module = results[name].module()
    layers = [layer for layer in module if isinstance(layer, nn.Linear)]
    assert all(parametrize.is_parametrized(layer, "weight") for layer in layers)
    module.eval()
    weights = [layer.weight.detach().clone() for layer in layers]
    for layer, weight in zip(layers, weights, strict=True):
        parametrize.remove_parametrizations(layer, "weight")
        assert torch.equal(layer.weight, weight)


@pytest.mark.parametrize("name", ["moving_average"])
def test_buffers_have_moved_and_are_the_modules_own(results, name):
    module = results[name].module()
    assert module.count.item() == 8
    assert module.average.abs().sum() > 0
    assert module.scale.item() != 1.0


@pytest.mark.parametrize("name", EACH)
def test_the_model_goes_on_training_by_itself(results, name):
    """No parameter is a leftover of the pool: gradients flow, an optimizer steps, and a copy can be made."""
    module = results[name].module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = {key: p.detach().clone() for key, p in module.named_parameters() if p.requires_grad}
    sum(p.pow(2).sum() for p in module.parameters()).backward()
    optimizer.step()
    assert all(
        not torch.equal(p, before[key]) for key, p in module.named_parameters() if p.requires_grad and before[key].any()
    )
