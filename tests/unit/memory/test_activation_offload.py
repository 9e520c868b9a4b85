"""What autograd saves goes to the host and comes back as autograd would have kept it: same bits, same refusals."""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.memory.activation_offload import SMALL_BYTES, SavedStorageCopy, SavedTensorSpiller
from tests.support.tracker import StorageTracker

ROWS = 64


@pytest.fixture
def device():
    made = CpuDevice(0, 1 << 30)
    yield made
    made.close()


@pytest.fixture
def saved(device):
    return SavedTensorSpiller(device, stays=lambda tensor: False)


def leaf(*shape):
    return torch.randn(*(shape or (ROWS, ROWS)), generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients(saved, step):
    """Of a step on a leaf, with and without its saved tensors spilled."""
    found = []
    for hooks in (None, saved):
        x = leaf()
        if hooks is None:
            step(x).backward()
        else:
            with hooks.hooks():
                step(x).backward()
        found.append(x.grad)
    return found


def chain(x):
    y = (x * 2).sigmoid()
    z = torch.nn.functional.dropout(y.t().tanh() @ y, 0.0)
    return (z[3:40, ::2].softmax(-1) * z.exp()[3:40, ::2]).expand(2, -1, -1).mean() + y.chunk(2)[1].square().sum()


def gradient_penalty(x):
    y = (x * 2).sigmoid()
    (slope,) = torch.autograd.grad(y.pow(3).sum(), y, create_graph=True)
    return (slope.norm(dim=1) - 1).pow(2).mean() + y.sum()


class Scratch(torch.autograd.Function):
    """Overwrites what it saved in its backward, as memory-saving code does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return x.mul_(2).mul_(gradient).clone()


def conjugated(x):
    """Views that are conjugated or negated when they are read."""
    return (x.conj() * x.exp()).real.sum() + (x.conj().imag * x.real.exp()).sum()


def gated(x):
    """Overwrites parts of one storage by chunks that have a version counter each."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        gru = nn.GRU(ROWS, ROWS, 2, batch_first=True)
    return gru(x.view(16, -1, ROWS))[0].square().mean()


STEPS = {
    "views, outputs, inputs": chain,
    "second derivatives": gradient_penalty,
    "channels last": lambda x: (
        nn.functional.conv2d((x * 1).view(1, 16, 16, 16).to(memory_format=torch.channels_last), torch.ones(4, 16, 3, 3))
        .square()
        .sum()
    ),
    "complex, conjugated": lambda x: conjugated(torch.view_as_complex((x * 1).view(-1, 2))),
    "chunks of one storage": gated,
    "a backward that overwrites": lambda x: Scratch.apply(x * 3).sum(),
    "checkpointed": lambda x: torch.utils.checkpoint.checkpoint(chain, x * 2, use_reentrant=False),
}


@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_the_same_to_the_last_bit(saved, name):
    plain, ours = gradients(saved, STEPS[name])
    assert plain.equal(ours)
    assert saved.bytes_out > 0


@pytest.mark.cases(1 / 3)
def test_nothing_saved_stays_on_the_device_between_forward_and_backward(saved):
    """A chain of five layers: without spilling all of it stays."""
    tracker = StorageTracker()

    def step(hooked):
        x = leaf(ROWS, ROWS)
        with tracker():
            if hooked:
                with saved.hooks():
                    y = (x * 1).sigmoid().tanh().sigmoid().tanh().sum()
            else:
                y = (x * 1).sigmoid().tanh().sigmoid().tanh().sum()
            gc.collect()
            current = tracker.current_bytes
            y.backward()
        return current

    size = ROWS * ROWS * 4
    assert step(hooked=False) >= 4 * size
    assert step(hooked=True) < 2 * size
    assert saved.peak_bytes == 4 * size
    assert saved.bytes_in == saved.bytes_out == 4 * size


def test_two_views_of_one_storage_are_copied_once(saved):
    x = leaf()
    size = ROWS * ROWS * 4
    with saved.hooks():
        y = x * 2
        loss = y[:32].square().sum() + y.t().exp().sum() + y.sigmoid().sum()
        assert saved.bytes_out == 3 * size, "y once, and the results of exp and sigmoid"
        del y
        loss.backward()


def test_the_copies_go_with_the_graph(saved):
    with saved.hooks():
        y = (leaf() * 2).sigmoid().sum()
    assert saved._host_bytes == ROWS * ROWS * 4
    assert len(saved._copies) == 1
    del y
    gc.collect()
    assert saved._host_bytes == 0
    assert len(saved._copies) == 0


def test_what_stays_anyway_is_not_copied(device):
    state, batch = leaf(), torch.randn(ROWS, ROWS)
    flat = torch.randn(3 * ROWS * ROWS)
    state.data = flat[ROWS * ROWS : 2 * ROWS * ROWS].view(ROWS, ROWS)
    given = {tensor.untyped_storage()._cdata for tensor in (flat, batch)}
    saved = SavedTensorSpiller(device, stays=lambda tensor: tensor.untyped_storage()._cdata in given)
    with saved.hooks():
        loss = (batch @ state @ state.t()).sum()
        assert saved.bytes_out == ROWS * ROWS * 4, "only the first product"
        loss.backward()


def test_small_tensors_stay(saved):
    x = torch.randn(SMALL_BYTES // 4 - 1, requires_grad=True)
    with saved.hooks():
        (x * 2).sigmoid().sum().backward()
    assert saved.bytes_out == 0
    x = torch.randn(SMALL_BYTES // 4, requires_grad=True)
    with saved.hooks():
        (x * 2).sigmoid().sum().backward()
    assert saved.bytes_out == SMALL_BYTES


def overwritten(x):
    y = x * 2
    z = y.sigmoid() + y.square()
    y.add_(1)
    return z.sum()


def overwritten_through_a_view(x):
    y = (x * 2).sigmoid()
    y[1].zero_()
    return y.sum()


def overwritten_small(x):
    y = x[:1] * 2
    z = y.square()
    y.add_(1)
    return z.sum()


def overwritten_leaf(x):
    w = torch.ones(ROWS, ROWS)
    z = x * w
    w.mul_(2)
    return z.sum()


def overwritten_in_a_backward(x):
    """The node that runs first overwrites what the other has saved."""
    y = x * 2
    return y.square().sum() + Scratch.apply(y).sum()


@pytest.mark.parametrize(
    "step",
    [overwritten, overwritten_through_a_view, overwritten_small, overwritten_leaf, overwritten_in_a_backward],
)
def test_what_autograd_refuses_is_refused(saved, step):
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        step(leaf()).backward()
    with saved.hooks():
        loss = step(leaf())
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()


def test_a_kept_branch_that_is_never_run_backward_does_not_lend_its_old_copy(saved):
    kept = []

    def step(x):
        y = x * 2
        kept.append(y.square())  # saves y as it is now, and its backward never runs
        y.add_(1)
        return y.square().sum()

    plain, ours = gradients(saved, step)
    assert plain.equal(ours)


def test_an_overwriting_that_autograd_does_not_see_shows_as_long_as_the_tensor_lives(saved):
    alive = []

    def step(x):
        y = x * 2
        alive.append(y)
        z = y.square().sum()
        y.data.add_(1)
        return z

    plain, ours = gradients(saved, step)
    assert plain.equal(ours)


def test_the_address_of_a_freed_storage_is_not_mistaken_for_it(saved):
    """The storage of a first load is free after the second one."""
    with torch.no_grad():
        packed = saved.pack(leaf().detach() * 2)
        addresses = {saved.unpack(packed).untyped_storage()._cdata for _ in range(2)}
        others = [torch.full((ROWS, ROWS), float(i)) for i in range(100)]
        assert addresses & {other.untyped_storage()._cdata for other in others}
        repacked = [saved.pack(other) for other in others]
        for other, again in zip(others, repacked, strict=True):
            assert again.bytes is not packed.bytes
            assert saved.unpack(again).equal(other)


@pytest.mark.cases(1 / 3)
def test_a_node_does_not_keep_itself_alive(saved):
    """A result that its own node saves, large or small, goes with the last reference."""
    gc.collect()
    gc.disable()
    try:
        for size in (8, SMALL_BYTES):
            with saved.hooks():
                y = torch.ones(size, requires_grad=True).sigmoid()
            storage = StorageWeakRef(y.untyped_storage())
            del y
            assert storage.expired()
    finally:
        gc.enable()


def test_unpacked_twice_it_is_loaded_once_if_it_is_still_there(saved):
    y = leaf().detach() * 2
    with torch.no_grad():
        one, two = saved.pack(y), saved.pack(y[5:])
    assert isinstance(one.bytes, SavedStorageCopy)
    assert one.bytes is two.bytes
    del y
    first = saved.unpack(one)
    second = saved.unpack(two)
    assert second.untyped_storage()._cdata == first.untyped_storage()._cdata
    assert saved.bytes_in == ROWS * ROWS * 4
    del first, second
    saved.unpack(one)
    assert saved.bytes_in == 2 * ROWS * ROWS * 4
