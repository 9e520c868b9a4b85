"""A model that shares tensors with one that was read before is copied, and its frozen parameters stay shared."""

import copy
import functools
import logging
import logging.handlers
import pickle
import threading
import types

import pytest
import torch
from torch import nn

from hydra_tune.errors import TaskError
from hydra_tune.shard.capture.step_capture import copied_model
from hydra_tune.train.own_copy import mark_seen, own_copy


def sharing(part):
    return nn.Sequential(part, nn.Linear(4, 2))


def test_only_what_was_seen_is_copied():
    part = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    mark_seen(sharing(part))
    alone = sharing(copy.deepcopy(part[:1]))
    assert own_copy(alone) is alone

    model = sharing(part)
    copied = own_copy(model)
    assert type(copied) is nn.Sequential
    assert all(torch.equal(value, copied.state_dict()[name]) for name, value in model.state_dict().items())
    assert {id(tensor) for tensor in copied.parameters()}.isdisjoint(map(id, model.parameters()))
    assert own_copy(copied) is copied
    elsewhere = pickle.loads(pickle.dumps(model))
    assert own_copy(elsewhere) is not elsewhere


def test_a_copied_parameter_has_the_attributes_that_an_optimizer_may_read():
    part = nn.Linear(4, 4)
    part.weight.lr_scale, part.weight.partners = 2.0, [part.bias]
    mark_seen(part)
    copied = own_copy(sharing(part))
    assert copied[0].weight.lr_scale == 2.0
    assert copied[0].weight.partners[0] is copied[0].bias
    assert own_copy(copied) is copied


def test_frozen_parameters_stay_shared():
    part = nn.Linear(4, 4).requires_grad_(False)
    mark_seen(sharing(part))
    model = sharing(part)
    assert own_copy(model, is_own=True) is model
    part.bias.requires_grad_(True)
    for is_own in (False, True):
        copied = own_copy(model, is_own=is_own)
        assert copied[0].weight is part.weight
        assert copied[0].bias is not part.bias


def test_trials_that_share_frozen_parameters_have_modes_of_their_own():
    part = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).requires_grad_(False)
    mark_seen(sharing(part))
    first, second = own_copy(sharing(part)), own_copy(sharing(part))
    first.eval()
    assert second[0][1].training
    assert first[0][0].weight is second[0][0].weight is part[0].weight


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_a_copy_would_lack_are_refused(register):
    part = nn.Linear(4, 4)
    getattr(part.weight, register)(lambda gradient: None)
    model = sharing(part)
    assert own_copy(model) is model
    mark_seen(model)
    with pytest.raises(TaskError, match=r"parameter '0.weight' has a hook .*; build all parts anew"):
        own_copy(sharing(part))
    part.requires_grad_(False)
    assert own_copy(sharing(part))[0].weight is part.weight


def patched(model):
    """Replace `forward` by a function that calls the former one, as libraries do."""
    former, head = model.forward, model[1]

    @functools.wraps(type(model).forward)
    def forward(self, x, *, with_head=True, again=0):
        return forward(self, x, again=again - 1) if again else former(x) if with_head else head(x)

    model.forward = types.MethodType(forward, model)
    return model


@pytest.mark.parametrize("copy_of", [own_copy, copied_model])
def test_functions_in_attributes_of_a_copy_call_the_copy(copy_of):
    model = patched(patched(sharing(nn.Linear(4, 4))))
    mark_seen(model)
    copied = copy_of(model)
    x = torch.ones(1, 4)
    assert torch.equal(copied(x), model(x))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    for again in range(3):
        assert not copied(x, again=again).any()
    assert not copied(x, with_head=False).any()
    assert model(x).any()
    assert copied.forward.__wrapped__ is nn.Sequential.forward


def by_partial(model):
    former, head = model.forward, model[1]
    return functools.partial(lambda again, x: head(model[0](x)) + again * former(x), 0)


def by_parameters(model):
    weight, (bias, *_) = model[1].weight, [model[1].bias]
    return lambda x: torch.nn.functional.linear(model[0](x), weight, bias)


def by_a_list(model):
    layers = {"all": [*model]}
    return lambda x: layers["all"][1](layers["all"][0](x))


def by_defaults(model):
    def forward(x, former=model.forward, *, head=model[1]):
        return former(x) + head(x)

    return forward


def by_an_object(model):
    owner = types.SimpleNamespace(call=lambda x: model[1](model[0](x)))
    return lambda x, scale=1.0: owner.call(x) * scale


def by_a_wrapped_function(model):
    former = model.forward

    @functools.wraps(lambda x: former(x) * 2)
    def forward(x):
        return forward.__wrapped__(x)

    return forward


PATCHES = [by_partial, by_parameters, by_a_list, by_defaults, by_an_object, by_a_wrapped_function]


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("copy_of", [own_copy, copied_model])
def test_a_patched_forward_of_a_copy_computes_with_the_copy(copy_of, patch):
    model = sharing(nn.Linear(4, 4))
    model.forward = patch(model)
    mark_seen(model)
    copied = copy_of(model)
    x = torch.ones(1, 4)
    assert torch.equal(copied(x), model(x))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(x).any()
    assert model(x).any()


@pytest.mark.parametrize("wrap", [lambda hook: hook, functools.partial])
def test_a_hook_of_a_copy_computes_with_the_copy(wrap):
    model = sharing(nn.Linear(4, 4))
    head = [model[1]]
    model.register_forward_hook(wrap(lambda module, given, out: head[0](given[0]) + out))
    mark_seen(model)
    copied = own_copy(model)
    x = torch.ones(1, 4)
    assert torch.equal(copied(x), model(x))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(x).any()


def test_a_function_may_hold_what_is_no_part_of_the_model():
    """A copy goes on sharing a counter; a function that holds no part of the model stays the same function."""
    model, calls = sharing(nn.Linear(4, 4)), [0]
    former = model.forward

    def forward(x):
        calls[0] += 1
        return former(x)

    model.forward, model.scale = forward, lambda x: x * len(calls)
    mark_seen(model)
    copied = own_copy(model)
    copied(torch.ones(1, 4))
    assert calls == [1]
    assert copied.scale is model.scale


GLOBAL = {}


@pytest.mark.parametrize("is_global", [True, False])
def test_a_function_of_a_copy_that_goes_on_holding_the_original_is_refused(is_global):
    model = sharing(nn.Linear(4, 4))
    GLOBAL["former"] = former = model.forward
    cached = functools.lru_cache(lambda: former)
    model.forward = (lambda x: 2 * GLOBAL["former"](x)) if is_global else (lambda x: 2 * cached()(x))
    mark_seen(model)
    with pytest.raises(
        TaskError, match=r"attribute 'forward' of Sequential holds a part of the model .*; build all parts anew"
    ):
        own_copy(model)
    GLOBAL.clear()


def test_functions_of_a_copy_go_on_sharing_their_variables():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def patch(model):
        current = model[0]

        def forward(x):
            return current(x)

        def switch():
            nonlocal current
            current = model[1]

        model.forward, model.switch = forward, switch

    patch(model)
    copied = copied_model(model)
    copied.switch()
    x = torch.ones(1, 2)
    assert torch.equal(copied(x), copied[1](x))
    assert torch.equal(model(x), model[0](x))


class Recorder:
    def __init__(self, model):
        self.model, self.scale, self.lock = model, 2.0, threading.Lock()

    def hook(self):
        return lambda module, args, output: output * self.scale


def test_hooks_share_an_object_that_cannot_be_copied():
    """The copy that `copy.deepcopy` had begun has no attributes."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    recorder = Recorder(model)
    for part in model:
        part.register_forward_hook(recorder.hook())
    x = torch.ones(1, 2)
    assert torch.equal(copied_model(model)(x), model(x))


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.ones(2))

    def __deepcopy__(self, memo):
        return self


def test_a_logger_and_a_module_that_copies_itself_as_the_same_object_may_be_shared():
    model = nn.Sequential(nn.Linear(2, 2), Table())
    mark_seen(model)
    handler = logging.handlers.MemoryHandler(100)
    model[0].logger = logging.getLogger("of a model")
    model[0].logger.addHandler(handler)
    model[0].logger.warning("%s", model)
    try:
        copied = own_copy(model)
        assert copied[0].weight is not model[0].weight
        assert copied[1] is model[1]
    finally:
        model[0].logger.removeHandler(handler)
