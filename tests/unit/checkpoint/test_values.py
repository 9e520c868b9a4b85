"""Values come back from JSON and tensors with their types and bits, or are refused by name."""

import json
import math
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch

from hydra_tune.checkpoint.values import decode, encode
from hydra_tune.errors import CheckpointError


class Pair(NamedTuple):
    a: int


VALUES = {
    "plain": [None, True, False, 3, -(2**80), "text", "", 0.1 + 0.2, -0.0, 5e-324],
    "odd floats": [math.inf, -math.inf],
    "tuples": (1, (2.0, ("x",)), []),
    "texts as keys": {"a": {"b": (1,)}, "": None},
    "a key of ours": {"$": "tensor", "is": "a"},
    "other keys": {1: "a", (2, 3): "b", None: "c", 1.5: "d"},
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "counter": Counter({30: 1, 80: 2}),
    "default": defaultdict(list, {"a": [1]}),
    "sets": [{1, 2}, frozenset({"a"})],
    "deque": deque([1, 2], maxlen=2),
    "torch": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
    "complex": 1.5 - 2j,
    "bytes": b"\x00\xff",
}


def there_and_back(value):
    tensors = {}
    text = json.dumps(encode(value, "value", tensors), allow_nan=False)
    return decode(json.loads(text), tensors)


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back(name):
    found = there_and_back(VALUES[name])
    assert found == VALUES[name]
    assert repr(found) == repr(VALUES[name])  # types, the order of keys, and the sign of zero


def test_nan_comes_back():
    assert math.isnan(there_and_back(math.nan))


def test_tensors_to_differentiate_by_come_back_as_such():
    leaf, tensors = torch.tensor(1.5, requires_grad=True), {}
    encoded = encode([leaf, leaf * 2, torch.ones(2)], "value", tensors)
    found = decode(encoded, {name: tensor.detach() for name, tensor in tensors.items()})
    assert [tensor.requires_grad for tensor in found] == [True, False, False]


def test_tensors_and_arrays_come_back():
    value = {"a": torch.arange(6).view(2, 3), "b": [torch.tensor(1.5), torch.empty(0, 2)]}
    found = there_and_back(value)
    assert torch.equal(found["a"], value["a"])
    assert [part.shape for part in found["b"]] == [(), (0, 2)]
    array, scalar = there_and_back((np.arange(4, dtype=np.uint32).reshape(2, 2), np.float64(0.1)))
    assert array.dtype == np.uint32
    assert array.tolist() == [[0, 1], [2, 3]]
    assert type(scalar) is np.float64
    assert scalar == 0.1


def test_tensors_of_like_names_stay_apart():
    tensors = {}
    encoded = encode({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}, "x", tensors)
    assert decode(encoded, tensors)["a.b"].item() == 0
    assert decode(encoded, tensors)["a"]["b"].item() == 1


@pytest.mark.parametrize("value", [object(), partial(int), print, Pair(1), {"deep": [object]}])
def test_what_cannot_be_held_is_refused_by_name(value):
    with pytest.raises(CheckpointError, match=r"momentum\S* is of type"):
        encode({"momentum": value}, "momentum", {})


@pytest.mark.parametrize("dtype", ["longdouble", "clongdouble", ">f8", ">i4"])
def test_numbers_that_torch_lacks_are_refused_by_name(dtype):
    with pytest.raises(CheckpointError, match="the loss holds numpy numbers of dtype"):
        encode(np.ones(2, dtype), "the loss", {})


@pytest.mark.parametrize("kind", [np.matrix, np.memmap])
def test_kinds_of_arrays_that_would_come_back_as_another_are_refused_by_name(kind, tmp_path):
    value = np.memmap(tmp_path / "array", mode="w+", shape=(2,)) if kind is np.memmap else np.ones((2, 2)).view(kind)
    with pytest.raises(CheckpointError, match=rf"the scales is of type numpy\S*\.{kind.__name__}"):
        encode(value, "the scales", {})


def test_what_contains_itself_is_refused():
    value: list = []
    value.append(value)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode(value, "value", {})


@pytest.mark.parametrize(
    "text", ['{"$": "pickle", "is": ""}', '{"$": "dtype", "is": "load"}', '{"$": "tensor", "is": "x"}']
)
def test_what_was_never_encoded_is_refused(text):
    with pytest.raises(CheckpointError, match="cannot be read"):
        decode(json.loads(text), {})


def test_a_pickle_is_bytes_and_nothing_else():
    class Evil:
        def __reduce__(self):
            return print, ("run",)

    found = there_and_back(pickle.dumps({"a": 1}))
    assert isinstance(found, bytes)
    with pytest.raises(CheckpointError):
        there_and_back(Evil())
