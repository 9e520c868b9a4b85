"""Blocks: tensors laid out in one buffer as if each were alone, and views that follow the bytes."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.memory.block import Block, BlockKind, BlockTensorView, TensorBlock, lay_out, whole_storage
from hydra_tune.memory.block_release import bring_home, drop
from hydra_tune.memory.pager import Pager


@pytest.fixture
def device():
    device = CpuDevice(0, 1 << 20)
    yield device
    device.close()


def group(device, tensors):
    return device.on_host(lambda: TensorBlock(BlockKind.PARAMETERS, tensors, device))


TENSORS = [
    torch.arange(3.0),
    torch.tensor(7, dtype=torch.int64),
    torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last),
    torch.tensor([True, False, True]),
    torch.arange(6.0).reshape(2, 3).t(),
    torch.zeros(0),
    torch.arange(4.0, dtype=torch.float64) * 1j,
    torch.arange(5.0).to(torch.bfloat16),
]


@pytest.mark.parametrize("alignment", [64, 512])
def test_every_tensor_is_aligned_apart_and_keeps_its_strides(alignment):
    slots, nbytes = lay_out(TENSORS, alignment)
    end = 0
    for slot, tensor in zip(slots, TENSORS, strict=True):
        start = slot.offset * tensor.element_size()
        assert start % alignment == 0
        assert start >= end, "no two overlap"
        end = start + tensor.numel() * tensor.element_size()
        assert (slot.shape, slot.stride, slot.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert end <= nbytes
    assert nbytes % alignment == 0
    assert nbytes == sum(-(-t.numel() * t.element_size() // alignment) * alignment for t in TENSORS)


@pytest.mark.parametrize(
    "tensor", [torch.ones(1, 3).expand(4, 3), torch.arange(10.0)[::2], torch.arange(20.0).view(4, 5)[:, :2]]
)
def test_a_tensor_with_gaps_or_overlaps_is_laid_out_contiguous(tensor):
    (slot,), nbytes = lay_out([tensor], 64)
    assert slot.stride == tensor.contiguous().stride()
    assert nbytes == 64


def test_a_group_takes_the_bytes_over_and_its_tensors_follow_it(device):
    originals = [nn.Parameter(t.clone()) if t.is_floating_point() else t.clone() for t in TENSORS]
    identities = [id(t) for t in originals]
    made = group(device, originals)
    for tensor, expected in zip(originals, TENSORS, strict=True):
        assert tensor.equal(expected)
        assert tensor.stride() == expected.stride()
        assert tensor.untyped_storage().data_ptr() == made.host.untyped_storage().data_ptr()
    with Pager(device).lease([made], 0):
        assert made.data is not None
        for tensor, expected in zip(originals, TENSORS, strict=True):
            assert tensor.equal(expected)
            assert tensor.untyped_storage().data_ptr() == made.data.untyped_storage().data_ptr()
            assert tensor.data_ptr() % 64 == 0
        originals[0].data.add_(1)
        made.dirty = True
    bring_home(made)
    assert originals[0].tolist() == [1, 2, 3]
    assert originals[0].untyped_storage().data_ptr() == made.host.untyped_storage().data_ptr()
    assert [id(t) for t in made.tensors] == identities, "the trial's own objects"
    assert isinstance(originals[0], nn.Parameter)


def test_a_group_that_lets_go_leaves_each_tensor_memory_of_its_own(device):
    made_by_class = [torch.arange(6.0).view(2, 3).t(), torch.ones(1, 2, 2, 2).to(memory_format=torch.channels_last)]
    originals = [nn.Parameter(t.clone()) for t in made_by_class]
    made = group(device, originals)
    flat = StorageWeakRef(made.host.untyped_storage())
    with made.lock:
        made.let_go()
        drop(made)
    for tensor, expected in zip(originals, made_by_class, strict=True):
        assert tensor.equal(expected)
        assert tensor.stride() == expected.stride()
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert flat.expired(), "the group's own buffer is freed"


def test_a_moving_group_tells_where_it_is(device):
    places = []
    made = group(device, [torch.ones(3)])
    made.on_moved = places.append
    pager = Pager(device)
    with pager.lease([made], 0):
        assert made.place == "cpu:0"
    bring_home(made)
    assert places == ["cpu:0", None]
    assert made.place is None


def test_views_of_one_storage_share_its_block():
    base = torch.arange(12.0)
    block = Block(BlockKind.ACTIVATIONS, 48, 64)
    values = [
        BlockTensorView(block, view) for view in (base, base[3:6], base.view(3, 4).t(), base.view(torch.int32)[2:])
    ]
    block.data = whole_storage(base.clone())
    found = [value.tensor() for value in values]
    assert found[1].tolist() == [3, 4, 5]
    assert found[2].equal(base.view(3, 4).t())
    assert found[2].stride() == (1, 4)
    assert found[3].equal(base.view(torch.int32)[2:])
    assert {t.untyped_storage().data_ptr() for t in found} == {block.data.data_ptr()}
    found[0][3] = 99
    assert values[1].tensor().tolist() == [99, 4, 5]


def test_the_ledger_counts_whole_multiples_of_the_alignment():
    assert Block(BlockKind.INPUTS, 1, 512).nbytes == 512
    assert Block(BlockKind.INPUTS, 512, 512).nbytes == 512
    assert Block(BlockKind.INPUTS, 0, 512).nbytes == 0


def test_the_whole_storage_is_the_same_memory():
    base = torch.arange(8.0)
    flat = whole_storage(base[4:])
    assert flat.numel() == 32
    assert flat.untyped_storage()._cdata == base.untyped_storage()._cdata
