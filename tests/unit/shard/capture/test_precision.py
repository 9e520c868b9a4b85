"""Autocast around pieces of a graph gives what one region around all of it gives, and disturbs no other thread."""

import multiprocessing
import threading
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune import TrainTask
from hydra_tune.shard.capture.precision import _CASTS, autocast, eager_autocast, regions_in_turn, share_casts
from hydra_tune.shard.capture.step_capture import capture, state_specs

PATIENCE_SECONDS = 60
BATCH = (torch.randn(4, 8), torch.randint(4, (4,)))


class Shared(nn.Module):
    def __init__(self, trained=True):
        super().__init__()
        self.shared, self.head = nn.Linear(8, 8).requires_grad_(trained), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.shared(self.shared(x).tanh()))


def captured_of(model, mode="train", precision="bfloat16"):
    task = TrainTask(
        model=Shared,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=functional.cross_entropy,
        train=lambda: [BATCH],
        precision=precision,
    )
    with autocast(precision):
        captured = capture(task, model, BATCH, mode)
    share_casts(captured, state_specs(model), precision)
    return captured


def casts(captured):
    return [node for node in captured.nodes if node.target is torch.ops.aten.to.dtype]


def test_a_parameter_that_several_operators_cast_is_cast_once():
    found = casts(captured_of(Shared()))
    assert [node.args[1] for node in found] == [torch.bfloat16] * 2  # weight and bias
    assert {len(node.users) for node in found} == {2}


@pytest.mark.parametrize(
    "options", [{"model": Shared(trained=False)}, {"model": Shared(), "mode": "evaluate"}], ids=["frozen", "evaluation"]
)
def test_without_gradients_nothing_is_shared(options):
    assert casts(captured_of(**options)) == []


def test_float32_is_left_alone():
    assert casts(captured_of(Shared(), precision="float32")) == []
    with autocast("float32"):
        assert not torch.is_autocast_enabled("cpu")


def test_the_region_is_what_autocast_is_and_ends():
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    with autocast("bfloat16"):
        assert functional.linear(x, weight).dtype == torch.bfloat16
        with autocast("float16"):
            assert functional.linear(x, weight).dtype == torch.float16
        assert functional.linear(x, weight).dtype == torch.bfloat16
    assert functional.linear(x, weight).dtype == torch.float32
    assert torch.is_autocast_cache_enabled()


def casts_behind(*results):
    """The number of casts to another precision in the history of some results."""
    found, waiting = set(), [result.grad_fn for result in results]
    while waiting:
        node = waiting.pop()
        if "ToCopy" in node.name():
            found.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return len(found)


def test_another_threads_casts_are_kept():
    """Eager code adds the gradients of one cast's uses in low precision; losing the cast between two uses changes them."""
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8)

    def disturb():
        with autocast("bfloat16"):
            functional.linear(x, weight)
        with regions_in_turn, torch.autocast("cpu", enabled=False):
            functional.linear(x, weight)

    def casts_of_weight(between):
        with torch.autocast("cpu", torch.bfloat16):
            one = functional.linear(x, weight)
            between()
            other = functional.linear(x, weight)
        return casts_behind(one, other)

    def elsewhere():
        thread = threading.Thread(target=disturb)
        thread.start()
        thread.join()

    assert casts_of_weight(lambda: None) == 1
    assert casts_of_weight(elsewhere) == 1


def test_threads_are_in_regions_of_eager_code_one_at_a_time():
    """Whoever leaves one clears the casts of all."""
    was_free = []

    def try_it():
        was_free.append(_CASTS.acquire(blocking=False))
        if was_free[-1]:
            _CASTS.release()

    def try_within(*regions):
        with ExitStack() as stack:
            for region in regions:
                stack.enter_context(region)
            thread = threading.Thread(target=try_it)
            thread.start()
            thread.join()
        return was_free.pop()

    on, off = partial(torch.autocast, "cpu", torch.bfloat16), partial(torch.autocast, "cpu", enabled=False)
    assert try_within()
    assert not try_within(eager_autocast("bfloat16"))
    assert try_within(eager_autocast("float32"))
    assert not try_within(regions_in_turn, on())
    assert not try_within(regions_in_turn, off(), on(), off())
    assert try_within(regions_in_turn, off())
    assert try_within(on()), "a region of no step"
    assert try_within()


def test_whoever_clears_the_casts_waits_for_the_step_in_its_region():
    def pass_through():
        with torch.autocast("cpu", enabled=False):
            entered.set()

    entered, thread = threading.Event(), threading.Thread(target=pass_through)
    weight = torch.randn(8, 8, requires_grad=True)
    with regions_in_turn, torch.autocast("cpu", torch.bfloat16):
        one = functional.linear(torch.ones(1, 8), weight)
        thread.start()
        assert entered.wait(60)
        thread.join(0.2)
        assert thread.is_alive()
        other = functional.linear(torch.ones(1, 8), weight)
    thread.join(60)
    assert not thread.is_alive()
    assert casts_behind(one, other) == 1


def test_a_region_that_a_step_does_not_leave_keeps_nobody_waiting():
    region = torch.autocast("cpu", torch.bfloat16)
    with regions_in_turn:
        region.__enter__()
    free = []
    thread = threading.Thread(target=lambda: free.append(_CASTS.acquire(blocking=False) and not _CASTS.release()))
    thread.start()
    thread.join()
    region.__exit__(None, None, None)
    assert free == [True]


def _enter_a_region():
    with eager_autocast("bfloat16"):
        pass


def test_a_process_forked_while_others_are_in_regions_finds_the_turn_free():
    """As the workers of a loader, which may be forked at any moment."""

    def work():
        while not is_over.is_set():
            _enter_a_region()

    is_over = threading.Event()
    busy = threading.Thread(target=work)
    busy.start()
    try:
        for _ in range(5):
            process = multiprocessing.get_context("fork").Process(target=_enter_a_region)
            process.start()
            process.join(PATIENCE_SECONDS)
            exitcode = process.exitcode
            process.kill()
            assert exitcode == 0
    finally:
        is_over.set()
        busy.join()
