"""Runs a step without arithmetic: every tensor has a number in place of its values, and equal numbers mean equal values.

Under `ValueNumbering`, an operator computes only where all its operands have values: the batch, constants, and results of
these. An operator that draws does not compute. Other results share memory that no operator writes. The number of a
result follows from the operator, its plain arguments, and the numbers and geometry of its operands. Two runs whose losses,
gradients and buffers have the same numbers run the same operators on the same operands, and so have the same bits. Where a
pool has no CPU device, or a step takes long on a CPU, `PlanLibrary` (`shard/partition/plan_cache.py`) has `verify`
(`plan_check.py`) compare the eager step with a plan in this way first: for a large model the numbers take seconds, and the
values minutes. `shard/partition/trial_step.py` raises `ValuesNeededError` for parameters and buffers of a class of their own.

Note: why not fake tensors. Code may ask whether its tensors are fake, and take another path than in training, as it did
during the capture. The tensors here are ordinary CPU tensors, so the eager step takes its ordinary path.

Note: values read without an operator. `tolist` and `numpy` read the shared memory. The memory starts with other bytes in
each run, so what the code makes of them differs between the two runs of the eager step.

Note: no numbers. Some operators hand values to Python that were not computed, belong to the user, or write to a tensor that
is neither a buffer nor a result. A step with such an operator ends with `ValuesNeededError`, and its plan is checked with
values.

Source: the value numbering of compilers (Alpern, Wegman and Zadeck 1988, section 2), for a step as it runs.
"""

import ctypes
import hashlib
import mmap
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from hydra_tune.shard.analysis.random_ops import draws_with
from hydra_tune.shard.capture.step_capture import named_state

_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})
_MOVING = frozenset({"aten::lift_fresh", "aten::set_"})  # compute nothing, like views
_COPYING = frozenset({"aten::clone", "aten::_to_copy", "aten::lift_fresh_copy", "aten::_reshape_copy"})
_UNMARKED = frozenset({"running_mean", "running_var"})  # written by forwards of BatchNorm, although no schema says so
_PAGE_BYTES = 4096
_SMALL_BYTES, _LARGE_BYTES = 1 << 20, 1 << 28  # largest results with values: of no operand, and of operands with values
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class ValuesNeededError(BaseException):
    """A step needs values. Not an `Exception`: user code that catches every `Exception` must not continue."""


@dataclass(slots=True)
class _NumberedStorage:
    """Number of the values of a storage, as read through the tensor that was the first on the storage.

    Attributes:
        alive: keeps the storage's identity from another storage, but not the memory.
        number: number of the values; None for a storage with real bytes that nobody writes.
        geometry: geometry of the first tensor.
        may_be_written: whether operators may write to the storage.
        is_real: whether the storage has its values: a batch, a constant, or what the step makes of these alone.
    """

    alive: StorageWeakRef
    number: int | None
    geometry: Hashable
    may_be_written: bool
    is_real: bool


class ValueNumbering(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers the values of several runs, so that the numbers of the runs can be compared.

    Raises:
        ValuesNeededError: raised from an operator whose results have no number.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers: dict[Hashable, int] = {}
        # Never cleared, because a run may read tensors that the run before has left behind.
        self._storages: dict[int, _NumberedStorage] = {}
        self._parameters: dict[str, int] = {}
        self._fake = FakeTensorMode()
        # By operator, plain arguments and geometry of the operands: stand-ins for the results, and for the operands.
        self._fake_runs: dict[Hashable, tuple[Any, tuple[Tensor, ...]]] = {}
        self._memory = mmap.mmap(-1, _PAGE_BYTES)
        self._filling = b"\x3f"

    @contextmanager
    def run(self, model: nn.Module) -> Iterator[None]:
        """Context of a run on a copy of the trial's model, whose parameters and buffers need no bytes."""
        for name, tensor in named_state(model):
            is_parameter = isinstance(tensor, nn.Parameter)
            if is_parameter and self._parameters.setdefault(name, _identity(tensor)) != _identity(tensor):
                raise ValuesNeededError(f"a run has given {name} other memory")
            self._enter(tensor, self._number("state", name), may_be_written=not is_parameter, is_real=False)
        self._filling = b"\xbf" if self._filling == b"\x3f" else b"\x3f"  # negative and positive numbers in turn
        self._fill()
        with self:
            yield

    def is_same(self, one: Tensor, other: Tensor) -> bool:
        """Whether two tensors have the same values."""
        return (self._value(one), one.shape, one.dtype) == (self._value(other), other.shape, other.dtype)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NO_KEYWORDS
    ) -> Any:
        schema = func._schema  # noqa: SLF001
        if func.is_view or schema.name in _MOVING or func.namespace == "profiler":
            return func(*args, **kwargs)
        if func.namespace != "aten":
            raise ValuesNeededError(schema.name)
        is_drawing = draws_with(func, args, kwargs)
        leaves: list[Any] = []
        form = _flattened((args, kwargs), leaves)
        random_state = self._moved_random_state() if is_drawing else None
        number = self._numbers_of_results(schema, args, leaves, form, random_state)
        written = _written(schema, args, kwargs)
        if not all(self._storages[_identity(tensor)].may_be_written for tensor in written):
            raise ValuesNeededError(f"{schema.name} writes to a tensor that is neither a buffer nor a result")
        found, given, is_real = self._found(func, args, kwargs, leaves, form, is_drawing=is_drawing)
        for position, tensor in enumerate(written):
            self._write(tensor, number(position, tensor.dtype), is_real=is_real)
        results, result_tree = tree_flatten(found)
        for position, result in enumerate(results):
            if id(result) in given:
                results[position] = given[id(result)]
            elif isinstance(result, Tensor):
                results[position] = self._result(result, partial(number, position, result.dtype), is_real=is_real)
            elif result is not None and not is_real:
                raise ValuesNeededError(f"{schema.name} returns more than tensors")
        return tree_unflatten(results, result_tree)

    def _numbers_of_results(
        self, schema: Any, args: Sequence[Any], leaves: Sequence[Any], form: Hashable, random_state: bytes | None
    ) -> Callable[[int, torch.dtype], int]:
        """Return a function from the position and dtype of a result of an operator to the number of the result."""
        arguments = list(map(self._argument, leaves))
        # In-place operators give their first argument what the others return.
        operator = schema.name.removesuffix("_")
        if operator == "aten::add" and len(leaves) == 2 and _are_alike(*leaves):  # noqa: PLR2004
            # The order of two summands decides no bit, and is another one where a cut is between the uses of a value.
            arguments.sort(key=repr)
        number = partial(self._number, "result", operator, schema.overload_name, form, random_state, *arguments)
        is_copy = operator in _COPYING or (operator == "aten::copy" and args[0].shape == args[1].shape)
        return partial(self._copied, args[operator == "aten::copy"], number) if is_copy else number

    def _result(self, found: Tensor, number: Callable[[], int], *, is_real: bool) -> Tensor:
        if not found.is_cpu or found.layout is not torch.strided:
            raise ValuesNeededError("a result has no plain memory")
        result = found if is_real else self._like(found)
        if _identity(result) not in self._storages:
            self._enter(result, number(), may_be_written=True, is_real=is_real)
        return result

    def _found(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        leaves: Sequence[Any],
        form: Hashable,
        *,
        is_drawing: bool,
    ) -> tuple[Any, dict[int, Tensor], bool]:
        """Run an operator whose arguments are `leaves` in the form of `form`.

        Returns:
            The results, the operands by the ids of results that are operands, and whether the results have values.
        """
        operands = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        if not is_drawing and all(self._storages[_identity(tensor)].is_real for tensor in operands.values()):
            return self._found_values(func, args, kwargs, operands)
        places = {name: place for place, name in enumerate(operands)}
        key = func, form, *(_form_of(leaf, places.get(id(leaf))) for leaf in leaves)
        if key not in self._fake_runs:
            found, fakes = self._fake_run(func, args, kwargs, operands, may_fail=False)
            self._fake_runs[key] = found, tuple(fakes.values())
        found, stand_ins = self._fake_runs[key]
        return found, dict(zip(map(id, stand_ins), operands.values(), strict=True)), False

    def _found_values(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], operands: Mapping[int, Tensor]
    ) -> tuple[Any, dict[int, Tensor], bool]:
        """Run an operator whose operands have values, if it has operands or its results are small; returns as `_found`."""
        found, fakes = self._fake_run(func, args, kwargs, operands, may_fail=bool(operands))
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in tree_leaves(found) if isinstance(tensor, Tensor))
        if nbytes <= (_LARGE_BYTES if operands else _SMALL_BYTES):
            return func(*args, **kwargs), {}, True
        if operands:
            raise ValuesNeededError(f"{func} makes {nbytes} bytes of the batch or of constants")
        return found, {id(fakes[name]): tensor for name, tensor in operands.items()}, False

    def _fake_run(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        operands: Mapping[int, Tensor],
        *,
        may_fail: bool,
    ) -> tuple[Any, dict[int, Tensor]]:
        """Run an operator on stand-ins without bytes; return the results, and the stand-ins by the ids of the operands."""
        with self._fake:
            fakes = {
                name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
                for name, tensor in operands.items()
            }
            fake_args, fake_kwargs = tree_map_only(Tensor, lambda tensor: fakes[id(tensor)], (args, dict(kwargs)))
            try:
                found = func(*fake_args, **fake_kwargs)
            except Exception as error:
                # Values, or a number of results that values decide.
                if not may_fail:
                    raise ValuesNeededError(str(func)) from error
                found = None
        if any(_geometry(fakes[name], 0) != _geometry(tensor, 0) for name, tensor in operands.items()):
            raise ValuesNeededError(f"{func} changes the geometry of an operand")
        return found, fakes

    def _fill(self) -> None:
        self._memory[:_PAGE_BYTES] = self._filling * _PAGE_BYTES

    def _like(self, fake: Tensor) -> Tensor:
        """Return a tensor on a storage of its own, in the shared memory."""
        nbytes = fake.untyped_storage().nbytes()
        if nbytes > len(self._memory):
            # The system provides no page before the page is touched.
            self._memory = mmap.mmap(-1, nbytes)
            self._fill()
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes) if nbytes else torch.empty(0)
        empty = torch.empty(0, dtype=fake.dtype)
        return empty.set_(flat.untyped_storage(), fake.storage_offset(), fake.shape, fake.stride())

    def _number(self, *facts: Hashable) -> int:
        return self._numbers.setdefault(facts, len(self._numbers))

    def _copied(self, source: Tensor, number: Callable[..., int], position: int, dtype: torch.dtype) -> int:
        """Number of a copy of a tensor: the tensor's own unless the copy is converted."""
        return self._value(source) if source.dtype == dtype else number(position, dtype)

    def _enter(self, tensor: Tensor, number: int | None, *, may_be_written: bool, is_real: bool) -> None:
        alive = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._storages[_identity(tensor)] = _NumberedStorage(
            alive, number, _geometry(tensor), may_be_written=may_be_written, is_real=is_real
        )

    def _write(self, tensor: Tensor, number: int, *, is_real: bool) -> None:
        storage = self._storages[_identity(tensor)]
        storage.is_real &= is_real
        if _geometry(tensor) != storage.geometry:
            number = self._number("written", storage.number, storage.geometry, _geometry(tensor), number)
        storage.number = number

    def _value(self, tensor: Tensor) -> int:
        """Number of a tensor's values."""
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.layout is torch.strided
        if not is_plain or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            raise ValuesNeededError("a tensor has no plain memory")
        storage = self._storages.get(_identity(tensor))
        if storage is None:
            self._enter(tensor, None, may_be_written=False, is_real=True)
            storage = self._storages[_identity(tensor)]
        if storage.number is None:
            # A batch, or a constant: no run has made the storage, so the bytes are real.
            values = tensor.detach().contiguous()
            found = (ctypes.c_char * (values.numel() * values.element_size())).from_address(values.data_ptr())
            return self._number("bytes", hashlib.sha256(found).digest(), tensor.shape, tensor.dtype)
        if _geometry(tensor) == storage.geometry:
            return storage.number
        return self._number("view", storage.number, storage.geometry, _geometry(tensor))

    def _argument(self, leaf: object) -> Hashable:
        if isinstance(leaf, Tensor):
            return self._value(leaf), leaf.shape, leaf.stride(), leaf.dtype
        if not isinstance(leaf, _PLAIN):
            raise ValuesNeededError(f"an argument is a {type(leaf).__name__}")
        # By `repr` and type: 1, 1.0 and True are equal, as are 0.0 and -0.0.
        return type(leaf).__name__, repr(leaf)

    @staticmethod
    def _moved_random_state() -> bytes:
        """Return the generator's state before an operator that draws; the generator has moved afterwards."""
        state = bytes(torch.get_rng_state().tolist())
        torch.rand(1)
        return state


def _identity(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the storage's identity


def _geometry(tensor: Tensor, offset: int | None = None) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.storage_offset() if offset is None else offset, tensor.dtype


def _flattened(item: Any, leaves: list[Any]) -> Hashable:
    """Append the arguments in `item` to `leaves`; return the form of the containers. Torch's own takes far longer."""
    if isinstance(item, list | tuple):
        return type(item), tuple([_flattened(part, leaves) for part in item])
    if isinstance(item, Mapping):
        return Mapping, tuple([(key, _flattened(part, leaves)) for key, part in item.items()])
    leaves.append(item)
    return None


def _form_of(leaf: object, place: int | None) -> Hashable:
    """Facts of an argument that decide the geometry of results; `place` is the number of an operand."""
    if isinstance(leaf, Tensor):
        return place, _geometry(leaf, 0), leaf.device
    return type(leaf).__name__, repr(leaf)


def _are_alike(one: object, other: object) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and _geometry(one, 0) == _geometry(other, 0)


def _written(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Arguments to which an operator writes, in the order of the schema."""
    written: list[Any] = []
    unmarked = frozenset() if schema.name.endswith("_backward") else _UNMARKED
    for position, argument in enumerate(schema.arguments):
        if argument.name in unmarked or (argument.alias_info is not None and argument.alias_info.is_write):
            written += tree_flatten(args[position] if position < len(args) else kwargs.get(argument.name))[0]
    return [value for value in written if value is not None]
