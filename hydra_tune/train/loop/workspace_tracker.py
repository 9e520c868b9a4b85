"""Room on a device's ledger for results of the user's own code, taken operator by operator.

`WholeModelRunner` (`direct.py`) follows the first step of each kind of batch with a `WorkspaceTracker`; `BatchUnits`
(`batch_units.py`) follows each float32 unit that runs the user's own code, and `train/own_loop/unit_memory.py` the first
units of a loop of the user's own.

Note: bits. While a mode is active, torch may choose kernels that round differently: under autocast, and in some backwards, such
as those of `prod` and of `masked_fill` with a learned value. No caller follows forwards or backwards of a task in low
precision. `direct.py` and the units of a step that runs whole (`shard/execute/compute.py`) leave the mode for such a backward;
the first units of a loop do not.

Note: sizes. The bytes of an operator's results come from running the same operator on tensors without bytes, once for
each geometry of its arguments. Where only a real run tells (`nonzero`), and for memory that the operator keeps for
itself, room is taken after the operator has run.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from hydra_tune.errors import BudgetError
from hydra_tune.memory.lease import Lease
from hydra_tune.shard.cost.pilot import StorageTracker, aligned, stored_parts

_MAX_KNOWN = 1 << 14
_PLAIN = (Tensor, nn.Parameter)
_KNOWN: dict[Hashable, int] = {}
"""Bytes by operator and geometry of the arguments, for all trials of the process; no lock, as equal keys have equal bytes."""


class WorkspaceTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """Follows the allocations of a step, or of a unit, and takes room beyond the granted bytes.

    Args:
        lease: source of room.
        granted_bytes: initial room of the step.
        shed: frees memory when there is no more room; None: nothing can be freed.

    Attributes:
        given_bytes: bytes of the batches, which no operator of the step allocates.

    Raises:
        BudgetError: from an operator without room for its results, before the operator runs where the sizes are known.
    """

    def __init__(
        self, lease: Lease, granted_bytes: int, alignment: int, shed: Callable[[], None] | None = None
    ) -> None:
        super().__init__(alignment)
        self._lease = lease
        self._granted_bytes = granted_bytes
        self._shed = shed
        self.given_bytes = 0
        self._is_shedding = False

    def use(self, lease: Lease, granted_bytes: int) -> None:
        """Take room from another lease from now on, the present bytes included."""
        self._lease, self._granted_bytes = lease, granted_bytes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch would otherwise leave the user's compiled code uncompiled for good."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Copies made by the shedding must not ask for room, because then they would shed again.
        if not self._is_shedding and _may_make(func):
            self._take(_made_bytes(func, args, kwargs or {}, self._alignment))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _track(self, tensor: Tensor, size: int | None = None) -> None:
        super()._track(tensor, size)
        if not self._is_shedding:
            self._take(0)

    def forget_peak(self) -> None:
        """Begin a part of the step, or a unit, that is measured by itself and gets no batch."""
        self.peak_bytes, self.given_bytes = self.current_bytes, 0

    def _take(self, more: int) -> None:
        """Ensure room for the present bytes and `more`."""
        needed_bytes = self.current_bytes + self.given_bytes + more
        if needed_bytes <= self._granted_bytes:
            return
        try:
            self._lease.grow(needed_bytes - self._granted_bytes)
        except BudgetError:
            # Without a way to free memory, the operator's caller has to handle the error.
            if self._shed is None:
                raise
            self._is_shedding = True
            try:
                self._shed()
            finally:
                self._is_shedding = False
            needed_bytes = self.current_bytes + self.given_bytes + more
            if needed_bytes <= self._granted_bytes:
                return
            self._lease.grow(needed_bytes - self._granted_bytes)
        self._granted_bytes = needed_bytes


@functools.lru_cache(maxsize=4096)
def _may_make(func: Any) -> bool:
    """Whether an operator returns anything beyond its arguments and views of its arguments."""
    return any(result.alias_info is None for result in func._schema.returns)  # noqa: SLF001 - torch has no public name


def _made_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], alignment: int) -> int:
    """Return the bytes of an operator's results; 0 where unknown."""
    try:
        key = (func, alignment, _geometry(args), _geometry(tuple(kwargs.items())))
        num_bytes = _KNOWN.get(key)
    # A subclass of tensors, or an argument that cannot be compared.
    except TypeError:
        return 0
    if num_bytes is None:
        if len(_KNOWN) >= _MAX_KNOWN:
            # A crude bound: data with ever-new shapes would grow the table for ever.
            _KNOWN.clear()
        num_bytes = _KNOWN[key] = _tried(func, args, kwargs, alignment)
    return num_bytes


def _geometry(argument: Any) -> Hashable:
    """Return a key of everything that the sizes of an operator's results depend on, without reading values."""
    if isinstance(argument, Tensor):
        # A nested tensor calls itself strided, but has no shape.
        if type(argument) not in _PLAIN or argument.layout is not torch.strided or argument.is_nested:
            raise TypeError
        return argument.shape, argument.stride(), argument.dtype
    if isinstance(argument, list | tuple):
        return tuple(map(_geometry, argument))
    if isinstance(argument, torch.Generator):
        return None
    hash(argument)
    return type(argument), argument


def _tried(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], alignment: int) -> int:
    try:
        with _disable_current_modes(), torch.no_grad():
            # Meta tensors run the operator's shape function only, and neither modes nor autograd may see the trial run.
            bodiless = tree_map(_without_bytes, (args, kwargs))
            results = func(*bodiless[0], **bodiless[1])
        argument_sizes = _sizes(bodiless)
    except Exception:  # noqa: BLE001 - an operator may refuse tensors without bytes
        return 0
    return sum(aligned(size, alignment) for storage, size in _sizes(results).items() if storage not in argument_sizes)


def _sizes(tree: Any) -> dict[int, int]:
    """Return the bytes of the storages in a tree of tensors, by storage identity."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    storages = [part.untyped_storage() for leaf in leaves for part in stored_parts(leaf)]
    return {storage._cdata: storage.nbytes() for storage in storages}  # noqa: SLF001 - torch has no public name


def _without_bytes(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device="meta")
    if isinstance(argument, torch.device):
        return torch.device("meta")
    return None if isinstance(argument, torch.Generator) else argument
