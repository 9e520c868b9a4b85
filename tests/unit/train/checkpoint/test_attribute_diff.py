"""What objects keep in attributes is put back: into the containers that others hold, and nowhere else."""

import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hydra_tune.checkpoint.values import decode, encode
from hydra_tune.train.checkpoint.attribute_diff import AttributeTracker


def tracker(*objects: SimpleNamespace) -> AttributeTracker:
    return AttributeTracker("model", lambda: [(str(index), one) for index, one in enumerate(objects)], frozenset())


def resumed(make: Callable[[], tuple[SimpleNamespace, ...]], train: Callable[..., Any], *, older: bool = False) -> Any:
    """Make objects, train them, and restore what has changed into others of the same make."""
    objects, others = make(), make()
    before = tracker(*objects)
    train(*objects)
    changes = before.changed()
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode([changes, before.details(changes)], "", tensors))
    values, details = decode(json.loads(text), tensors)
    tracker(*others).restore(values, None if older else details)
    assert [vars(one) for one in others] == [vars(one) for one in objects]
    return others


CONTAINERS = {
    "dict": ({"a": 1, "b": 2}, lambda value: (value.pop("a"), value.update(c=3))),
    "ordered": (OrderedDict(a=1, b=2), lambda value: value.move_to_end("a")),
    "defaultdict": (defaultdict(list), lambda value: value[3].append(1)),
    "counter": (Counter("aab"), lambda value: value.update("b")),
    "list": ([1, 2], lambda value: value.append(3)),
    "shorter list": ([1, 2], lambda value: value.pop()),
    "set": ({1, 2}, lambda value: (value.remove(1), value.add(3))),
    "deque": (deque([1, 2], maxlen=2), lambda value: value.append(3)),
    "nested": ({"a": [{1}]}, lambda value: value["a"][0].add(2)),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_that_was_filled_stays_shared(name):
    value, change = CONTAINERS[name]

    def make():
        shared = decode(encode(value, "", {}), {})
        return SimpleNamespace(held=shared), SimpleNamespace(also=shared)

    one, other = resumed(make, lambda one, _: change(one.held))
    assert one.held is other.also
    assert type(one.held) is type(value)


def test_a_container_inside_another_stays_shared():
    def make():
        shared: list[int] = []
        return SimpleNamespace(all={"first": shared}), SimpleNamespace(own=shared)

    one, other = resumed(make, lambda _, other: other.own.append(1))
    assert one.all["first"] is other.own


def test_a_container_that_was_replaced_is_not_filled():
    default: list[int] = []
    one, other = resumed(
        lambda: (SimpleNamespace(held=default), SimpleNamespace(also=default)),
        lambda one, _: setattr(one, "held", [*one.held, 1]),
    )
    assert (one.held, other.also, default) == ([1], [], [])


def test_containers_replaced_inside_another_are_not_filled():
    default: list[int] = []

    def train(one):
        for index in range(2):
            one.held[index] = [*one.held[index], index]

    (one,) = resumed(lambda: (SimpleNamespace(held=[default] * 2),), train)
    assert (one.held, default) == ([[0], [1]], [])


def test_deleted_attributes_are_deleted_again():
    (one,) = resumed(lambda: (SimpleNamespace(warm=True, kept=1),), lambda one: delattr(one, "warm"))
    assert vars(one) == {"kept": 1}


def test_an_equal_tensor_in_a_container_stays_the_same_object():
    shared = torch.ones(2)
    made = SimpleNamespace(held=[shared, 0])
    before = tracker(made)
    made.held[1] = 1
    changes = before.changed()
    other = SimpleNamespace(held=[shared, 0])
    tracker(other).restore({"0": {"held": [shared.clone(), 1]}}, before.details(changes))
    assert other.held[0] is shared
    assert other.held[1] == 1


def test_an_older_checkpoint_without_details_is_restored():
    def make():
        return (SimpleNamespace(held={"a": [1]}, count=0),)

    def train(one):
        one.held["a"].append(2)
        one.count += 1

    (one,) = resumed(make, train, older=True)
    assert one.held == {"a": [1, 2]}
