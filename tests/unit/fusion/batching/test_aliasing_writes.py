"""Writes through views: stacked where they do what they do alone, refused where the layout would decide."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune.errors import UnfusableError
from tests.unit.fusion.compile.test_batched_plan import compare
from tests.unit.shard.bench import bench, task_of

_GENERATOR = torch.Generator().manual_seed(3)
IMAGES = torch.randn(6, 2, 4, 4, generator=_GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(3, (6,), generator=_GENERATOR)


class Written(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.write = write
        self.first, self.second, self.head = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3), nn.Linear(12, 3)
        self.register_buffer("seen", torch.zeros(3, 4))

    def forward(self, x):
        h = self.write(self, self.first(x))
        return self.head(self.second(h).flatten(1))


def set_first(_, h):
    h.view(len(h), -1)[:, 0] = 1.0
    return h


def rectify_flat(_, h):
    functional.relu_(h.flatten(1))
    return h


def rectify_copy(_, h):
    """Alone, channels that are moved to the end are copied."""
    functional.relu_(h.permute(0, 2, 3, 1).reshape(-1, 3))
    return h


def rectify_base(_, h):
    flat = h.flatten(1)
    h.relu_()
    return flat.view_as(h)


def into_the_base(_, h):
    with torch.no_grad():
        base = h.detach()
        flat = base.flatten(1)
        torch.mul(base, 3.0, out=base)
    return h + flat.view_as(h)


def within_a_region(_, h):
    with torch.no_grad():
        h.detach().flatten(1).mul_(2.0)
    return h


def without_the_base(_, h):
    return functional.relu_(h.flatten(2)).unflatten(2, (4, 4))


def a_slice(_, h):
    h[:, :, 0] = 0.5
    return h


def a_buffer(module, h):
    with torch.no_grad():
        module.seen.view(-1)[:3] += h.mean((0, 2, 3))
    return h + module.seen.mean()


@pytest.mark.parametrize(
    "write",
    [set_first, rectify_flat, rectify_copy, rectify_base, into_the_base, within_a_region],
    ids=lambda write: write.__name__,
)
def test_a_write_that_the_layout_may_hide_is_refused(write):
    with pytest.raises(UnfusableError, match="overwrites a view whose base is read later"):
        compare(bench(_task(write)))


@pytest.mark.parametrize("write", [without_the_base, a_slice, a_buffer], ids=lambda write: write.__name__)
def test_other_writes_are_stacked(write):
    compare(bench(_task(write)), is_traced=True)


def test_values_found_by_strides_are_refused():
    """Stacked behind a convolution, a member's numbers have other strides than alone."""
    with pytest.raises(UnfusableError, match=r"as_strided\.default finds values by strides"):
        compare(bench(_task(lambda _, h: h + h.as_strided((len(h), 1, 1, 1), (48, 1, 1, 1), 0))))


def test_a_result_written_into_a_tensor_without_members_is_refused():
    def write(_, h):
        with torch.no_grad():
            room = torch.ones(len(h), dtype=h.dtype).sqrt()
            torch.mul(h.detach().mean((1, 2, 3)), 2.0, out=room)
        return h + room.mean()

    with pytest.raises(UnfusableError, match="overwrites a tensor that does not depend on the trial"):
        compare(bench(_task(write)))


def _task(write):
    return task_of(Written(write).double(), train=lambda: [(IMAGES, CLASSES)], loss=functional.cross_entropy)
