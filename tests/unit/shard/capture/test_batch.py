"""Batches come apart into tensors and a signature, and go together again."""

import dataclasses
import sys
import threading
from collections import UserDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch

from hydra_tune.errors import TaskError
from hydra_tune.shard.capture.batch import TENSOR, flatten, plain_mappings, tensor_bytes

PATIENCE_SECONDS = 60


class Pair(NamedTuple):
    inputs: torch.Tensor
    name: str


class Encoding(UserDict):
    """A mapping that is no dict, as tokenizers return."""


def signature(batch):
    return flatten(batch).signature


def test_any_nesting_comes_back_as_it_was():
    x, y = torch.randn(2), torch.arange(3)
    batch = {"a": [x, 1, None], "b": Pair(y, "n"), "c": (), "d": (True, "text", 0.5)}
    leaves = flatten(batch)
    assert [id(t) for t in leaves.tensors] == [id(x), id(y)]
    assert leaves.values.count(TENSOR) == 2
    again = leaves.rebuild((y, x))
    assert again["a"] == [y, 1, None] or again["a"][0] is y
    assert again["a"][1:] == [1, None]
    assert isinstance(again["b"], Pair)
    assert again["b"].inputs is x
    assert again["b"].name == "n"
    assert again["c"] == ()
    assert again["d"] == (True, "text", 0.5)


def test_mappings_become_dicts_at_every_depth():
    batch = Encoding(ids=torch.zeros(1), more=[Encoding(mask=torch.ones(1))])
    for plain in (plain_mappings(batch), flatten(batch).rebuild(flatten(batch).tensors)):
        assert isinstance(plain, dict)
        assert isinstance(plain["more"][0], dict)
        assert not isinstance(plain, Encoding)
        assert plain.ids is plain["ids"]
        assert plain.more[0].mask is plain["more"][0]["mask"]
        with pytest.raises(AttributeError, match="the batch has no item 'labels'"):
            _ = plain.labels
    assert isinstance(batch, Mapping)
    assert type(plain_mappings({"more": {}})["more"]) is dict


def test_threads_make_one_dataclass_known_at_once():
    batches = [dataclasses.make_dataclass(f"Batch{number}", ["x"])(torch.ones(1)) for number in range(200)]
    barrier = threading.Barrier(2)

    def take_apart():
        for batch in batches:
            barrier.wait(PATIENCE_SECONDS)
            assert len(flatten(batch).tensors) == 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            futures = [threads.submit(take_apart) for _ in range(2)]
            # An error of one thread must not leave the other waiting.
            for future in futures:
                future.add_done_callback(lambda done: done.exception() and barrier.abort())
            for future in futures:
                future.result(PATIENCE_SECONDS)
    finally:
        sys.setswitchinterval(interval)


def test_without_tensors_keeps_the_structure_and_no_tensor():
    leaves = flatten((torch.zeros(3), 2))
    bare = leaves.without_tensors()
    assert bare.tensors == ()
    one = torch.ones(3)
    assert bare.rebuild((one,))[0] is one
    assert bare.rebuild((one,))[1] == 2


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(2, 4), 1),
        (torch.zeros(4, 2).t(), 1),
        (torch.zeros(2, 3, dtype=torch.float64), 1),
        (torch.zeros(2, 3).requires_grad_(), 1),
        (torch.zeros(2, 3), 2),
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3), 1.0),
        (torch.zeros(2, 3), None),
        [torch.zeros(2, 3), 1],
        {"a": torch.zeros(2, 3), "b": 1},
    ],
    ids=lambda other: str(type(other)),
)
def test_what_a_graph_bakes_in_is_in_the_signature(other):
    assert signature(other) != signature((torch.zeros(2, 3), 1))


def test_a_number_that_a_graph_bakes_in_is_told_apart_by_sign_and_equals_itself():
    assert signature((torch.zeros(1), 0.0)) != signature((torch.zeros(1), -0.0))
    assert signature((torch.zeros(1), float("nan"))) == signature((torch.zeros(1), float("nan")))


def test_keys_are_told_apart_by_type():
    assert signature({1: torch.zeros(1)}) != signature({"1": torch.zeros(1)})
    assert signature({"a": torch.zeros(1)}) != signature({"b": torch.zeros(1)})


def test_values_of_tensors_are_not_in_the_signature():
    assert signature((torch.zeros(2, 3), 1)) == signature((torch.ones(2, 3), 1))
    assert signature(Encoding(a=torch.zeros(1))) == signature(Encoding(a=torch.ones(1)))
    assert hash(signature({"a": (torch.zeros(1), "text")})) is not None


def test_a_slice_does_not_drag_the_data_set_along():
    everything = torch.arange(1000.0)
    part = flatten((everything[10:14],)).tensors[0]
    assert tensor_bytes(part) == 16
    assert part.tolist() == [10, 11, 12, 13]
    whole = flatten((everything,)).tensors[0]
    assert whole is everything


def test_an_expanded_tensor_gets_a_storage_of_its_own():
    row = torch.ones(1, 3).expand(5, 3)
    (tensor,) = flatten(row).tensors
    assert tensor_bytes(tensor) == 60
    assert tensor.equal(row)


def test_a_leaf_that_is_no_value_is_refused():
    with pytest.raises(TaskError, match="not bytearray; make it a tensor"):
        flatten({"a": bytearray(3)})
