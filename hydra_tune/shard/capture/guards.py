"""Guards: record the questions of a step's Python about the batch's values, and ask the questions again for other batches.

Code that asks `mask.all()` takes another path for another batch, but a capture follows a single path. If the answers
follow from the batch alone, the questions can be asked of every batch beforehand. A plan then serves the batches with
the same answers, and other batches have another plan. Questions about anything else (parameters, random numbers) are not
answered here. `run_eager` (`shard/verify/step_outcome.py`) records a guard while a new plan is checked, and `ask`
(`value_replay.py`) follows an eager run with a recorder alone. `shard/partition/plan_cache.py` and
`train/loop/plan_cache.py` ask the guard before the plan serves another batch, inside the gate (`capture_lock.py`), because a
guard computes. A guard must leave the batch as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

READS = frozenset({"aten::_local_scalar_dense", "aten::equal"})
"""Operators that hand a value to Python, or to the operator that contains them."""

_CONSTANTS = {"aten::lift_fresh", "aten::lift", "aten::lift_fresh_copy"}


@dataclass(frozen=True, slots=True)
class _GuardTensorSlot:
    """Stands for a tensor of the recording."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordedOperator:
    """A recorded operator: arguments with slots in place of tensors, and the slots of the results.

    Attributes:
        number: position among all operators of the run.
        written: storages changed by the operator; the results need not include the changed tensors.
        is_read: whether the operator hands a value to Python.
        answer: answer to a question; None for an operator that only leads to a question.
    """

    number: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[_GuardTensorSlot, ...]
    written: frozenset[int] = frozenset()
    is_read: bool = False
    answer: object = None

    def again(self, found: Mapping[_GuardTensorSlot, Tensor]) -> Any:
        """Run the operator on other tensors."""
        args, kwargs = pytree.tree_map(
            lambda leaf: found[leaf] if isinstance(leaf, _GuardTensorSlot) else leaf, (self.args, self.kwargs)
        )
        return self.func(*args, **kwargs)

    @property
    def reads(self) -> list[_GuardTensorSlot]:
        """Slots among the operator's arguments."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, _GuardTensorSlot)]


@dataclass(frozen=True, slots=True)
class BatchValueGuard:
    """Questions of a run, and their answers."""

    calls: tuple[_RecordedOperator, ...]
    constants: dict[_GuardTensorSlot, Tensor]

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a batch with these tensors gives the same answers."""
        tensors_by_slot: dict[_GuardTensorSlot, Tensor] = {
            _GuardTensorSlot(number): tensor for number, tensor in enumerate(tensors)
        }
        tensors_by_slot |= self.constants
        if any(call.func._schema.is_mutable for call in self.calls):  # noqa: SLF001 - the batch must not change
            tensors_by_slot = {slot: tensor.clone() for slot, tensor in tensors_by_slot.items()}
        with torch.no_grad():
            for call in self.calls:
                result = call.again(tensors_by_slot)
                if call.is_read and not _is_same(result, call.answer):
                    return False
                if not call.is_read:
                    outs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
                    tensors_by_slot |= dict(zip(call.outs, outs, strict=True))
        return True


def _is_same(answer: object, expected: object) -> bool:
    """Whether code behaves equally with both answers: 0.0 and -0.0 differ, NaN equals NaN."""
    return type(answer) is type(expected) and repr(answer) == repr(expected)


class BatchGuardRecorder:
    """Follows the batch through an eager run; must be told of every operator, in order.

    Args:
        tensors: tensors of the batch, in the order of the arguments of `BatchValueGuard.holds`.

    Attributes:
        num_reads: number of questions so far, of any kind.
        asks_otherwise: whether any question was not about the batch alone.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._slots: dict[tuple[Any, ...], _GuardTensorSlot] = {}
        # Tensors are identified by the address of their storage, so no tensor may be freed.
        self._kept: list[Tensor] = []
        self._tainted: dict[int, Any] = {}  # kept alive for the same reason
        self._constants: dict[_GuardTensorSlot, Tensor] = {}
        self._calls: list[_RecordedOperator] = []
        self._number = 0
        self.num_reads = 0
        self.asks_otherwise = False
        for tensor in tensors:
            self._slot(tensor)

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record an operator that has run."""
        self._number += 1
        operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_read = func._schema.name in READS  # noqa: SLF001
        self.num_reads += is_read
        if func._schema.name in _CONSTANTS and not self._knows(operands[0]):  # noqa: SLF001
            # A tensor literal of the code. Cloned, because the code may overwrite the tensor later.
            self._constants[self._slot(operands[0])] = operands[0].clone()
        written_storages = _written(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags or not all(map(self._knows, operands)):
            # A tensor overwritten by an unknown operator is unknown from then on.
            self._tainted |= {storage._cdata: storage for storage in written_storages}  # noqa: SLF001
            # The answer follows from more than the batch, so the question cannot be asked of another batch.
            self.asks_otherwise = self.asks_otherwise or is_read
            return
        args, kwargs = pytree.tree_map(
            lambda leaf: self._slot(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        outs = tuple(self._slot(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
        written = frozenset(storage._cdata for storage in written_storages)  # noqa: SLF001
        self._calls.append(
            _RecordedOperator(
                number=self._number,
                func=func,
                args=args,
                kwargs=kwargs,
                outs=outs,
                written=written,
                is_read=is_read,
                answer=result if is_read else None,
            )
        )

    def finish(self) -> tuple[BatchValueGuard | None, frozenset[int]]:
        """Return the run's guard, None without questions, and the numbers of the guard's operators in the run.

        The step may compute with results of these operators as well.
        """
        calls = self._leading_to_reads()
        guard = BatchValueGuard(tuple(calls), self._constants) if calls else None
        numbers = frozenset(call.number for call in calls)
        return guard, numbers

    def _leading_to_reads(self) -> list[_RecordedOperator]:
        """Questions and, walking backward, all operators that made or changed tensors behind the questions."""
        # By storage and not by slot: an in-place operator on another view changes the answer as well.
        storage = {slot: key[0] for key, slot in self._slots.items()}
        needed: set[Any] = set()
        leading_calls: list[_RecordedOperator] = []
        for call in reversed(self._calls):
            if call.is_read or not needed.isdisjoint({storage[slot] for slot in call.outs} | call.written):
                leading_calls.append(call)
                needed |= {storage[slot] for slot in call.reads}
        return leading_calls[::-1]

    def _key(self, tensor: Tensor) -> tuple[Any, ...]:
        storage = tensor.untyped_storage()._cdata  # noqa: SLF001 - the storage's identity
        return (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _knows(self, tensor: Tensor) -> bool:
        key = self._key(tensor)
        return key in self._slots and key[0] not in self._tainted

    def _slot(self, tensor: Tensor) -> _GuardTensorSlot:
        key = self._key(tensor)
        if key not in self._slots:
            self._slots[key] = _GuardTensorSlot(len(self._slots))
            self._kept.append(tensor)
        return self._slots[key]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Storages written by an operator."""
    return [
        leaf.untyped_storage()
        for argument, value in [*zip(func._schema.arguments, args, strict=False), *_named(func, kwargs)]  # noqa: SLF001
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]


def _named(func: Any, kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]  # noqa: SLF001
