"""`GeometryFakeMode` gives what torch's own fake mode gives, at the first run of an operator and at each later one."""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hydra_tune.shard.fake.geometry_memo import GeometryFakeMode

aten = torch.ops.aten

OPERATORS = {
    "new memory": aten.mm,
    "another dtype": lambda x, y: aten.gt(x, 0.0),
    "a scalar of another type": lambda x, y: (aten.pow(x, 2), aten.pow(x, 2.0), aten.mul(x, True)),
    "strided memory": lambda x, y: aten.mul(aten.t(x), 2.0),
    "several results": lambda x, y: aten.native_layer_norm(x, [4], None, None, 1e-5),
    "a view": lambda x, y: aten.view(x, [16]),
    "a view of a view": lambda x, y: aten.slice(aten.t(x), 0, 1, 3),
    "views of one storage": lambda x, y: tuple(aten.split(x, 2)),
    "the operand itself": lambda x, y: aten.contiguous(x),
    "a copy or the operand": lambda x, y: (aten.reshape(x, [16]), aten.reshape(aten.t(x), [16])),
    "an operand twice": lambda x, y: (aten.add(x, x), aten.add(x, y)),
    "written in place": lambda x, y: aten.add_(x, 1.0),
    "random": lambda x, y: aten.bernoulli(x, 0.5),
    "no operand": lambda x, y: aten.full([2, 3], 1.0),
    "a list of operands": lambda x, y: aten.cat([x, y]),
    "a number": lambda x, y: aten.mul(x, aten.lift_fresh_copy(torch.tensor(2.0))),
    "an expanded view": lambda x, y: aten.expand(aten.sum(x), [4, 4]),
    "attention": lambda x, y: aten.scaled_dot_product_attention(*[aten.view(x, [1, 1, 4, 4])] * 3),
}


def seen(mode, run):
    """Geometry of the results, and the number of the storage of each among those of the operands and the results."""
    with mode:
        x, y = torch.empty(4, 4), torch.empty(4, 4)
        results = run(x, y)
    tensors = [x, y, *(results if isinstance(results, tuple) else [results])]
    numbers: dict[int, int] = {}
    found = []
    for tensor in tensors:
        assert isinstance(tensor, Tensor)
        storage = tensor.untyped_storage()
        number = numbers.setdefault(storage._cdata, len(numbers))
        geometry = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
        found.append((*geometry, storage.nbytes(), number))
    return found


@pytest.mark.parametrize("name", OPERATORS)
def test_first_and_later_runs_are_torchs(name):
    mode, expected = GeometryFakeMode(), seen(FakeTensorMode(), OPERATORS[name])
    assert [seen(mode, OPERATORS[name]) for _ in range(3)] == [expected] * 3


def test_a_known_operator_is_not_run_again(monkeypatch):
    mode = GeometryFakeMode()
    seen(mode, OPERATORS["several results"])
    calls = []
    original = FakeTensorMode.dispatch
    monkeypatch.setattr(
        FakeTensorMode, "dispatch", lambda self, func, *rest: calls.append(func) or original(self, func, *rest)
    )
    seen(mode, OPERATORS["several results"])
    assert aten.native_layer_norm.default not in calls


def test_a_storage_ends_with_its_tensors():
    with GeometryFakeMode():
        ends = []
        for _ in range(2):
            source = torch.empty(16, dtype=torch.uint8)
            ends.append(weakref.ref(source.untyped_storage()))
            view = torch.empty(0).set_(source.untyped_storage(), 0, (4,), (1,)).view(2, 2)
            del source, view
    gc.collect()
    assert [end() for end in ends] == [None, None]
