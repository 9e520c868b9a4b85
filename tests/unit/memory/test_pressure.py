"""Which errors say that memory has run out."""

import pytest
import torch

from hydra_tune.errors import BudgetError
from hydra_tune.memory.pressure import NotRepeatableError, is_out_of_memory, not_repeatable

HUGE = 2**60


@pytest.mark.parametrize(
    "asks", [lambda: torch.empty(HUGE, dtype=torch.uint8), lambda: bytearray(HUGE)], ids=["torch", "python"]
)
def test_what_allocators_raise_is_shortage(asks):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        asks()
    assert is_out_of_memory(caught.value)
    with pytest.raises(NotRepeatableError, match="half way") as wrapped, not_repeatable("half way"):
        asks()
    assert is_out_of_memory(wrapped.value.__cause__)


@pytest.mark.parametrize(
    "fails", [lambda: torch.ones(2) @ torch.ones(3), lambda: torch.empty(-1)], ids=["shapes", "negative"]
)
def test_other_errors_of_torch_are_not_shortage(fails):
    with pytest.raises(RuntimeError) as caught, not_repeatable("half way"):
        fails()
    assert not is_out_of_memory(caught.value)


def test_cudas_error_is_shortage_and_the_ledgers_is_not():
    """The one is the device's, and there may be room the next time; the other is arithmetic, and comes again."""
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert not is_out_of_memory(BudgetError("the trial needs 2.0 GiB at once"))
    assert not is_out_of_memory(None)
