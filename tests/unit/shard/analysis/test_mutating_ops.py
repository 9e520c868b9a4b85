"""Which operators need not be run on tensors without bytes."""

import pytest
import torch

from hydra_tune.shard.analysis.mutating_ops import overwritten
from hydra_tune.shard.fake.fake_world import RehearsalFakeMode

ATEN = torch.ops.aten


@pytest.mark.parametrize("func", [ATEN.add_.Tensor, ATEN.lerp_.Scalar, ATEN.copy_.default, ATEN.zero_.default])
def test_those_that_only_overwrite_return_their_first_argument(func):
    with RehearsalFakeMode():
        fake = torch.empty(3)
    for tensor in (fake, torch.empty(3, device="meta")):
        assert overwritten(func, (tensor, tensor)) is tensor


@pytest.mark.parametrize(
    "func", [ATEN.add.Tensor, ATEN.add.out, ATEN.transpose_.default, ATEN.resize_.default, ATEN.set_.source_Tensor]
)
def test_those_that_make_memory_or_change_a_geometry_are_run(func):
    tensor = torch.empty(3, device="meta")
    assert overwritten(func, (tensor, tensor)) is None


def test_a_tensor_with_bytes_or_of_known_value_is_overwritten():
    assert overwritten(ATEN.zero_.default, (torch.ones(3),)) is None
    with RehearsalFakeMode():
        known = torch.tensor(1.0)
        assert overwritten(ATEN.add_.Tensor, (known, known)) is None
