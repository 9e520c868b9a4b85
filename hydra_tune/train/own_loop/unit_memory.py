"""`LoopUnitMemory`: the room that the units of a loop take beside the registered state.

The first two units are followed: a mode sees each operator and takes room on the device's ledger before the operator
allocates (`train/loop/workspace_tracker.py`). In other precisions than float32 no mode follows, and only tensors saved by
autograd are seen. Later units get the most that these took. An unregistered value that the loop keeps from unit to unit
counts, as long as a followed unit has made the value.

`LoopTrial` (`loop_trial.py`) enters `unit` on the loop's own thread, and a burst (`train/loop/burst.py`) enters `held` on
the thread of the device. Either thread sleeps while the other runs (`loop_thread.py`), so `LoopUnitMemory` takes no lock.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from hydra_tune.devices.device import Device
from hydra_tune.errors import TaskError
from hydra_tune.memory.activation_offload import LazySavedTensorSpiller
from hydra_tune.memory.lease import Lease
from hydra_tune.train.loop.workspace_tracker import WorkspaceTracker

# The first makes the optimizer's state, which the second has beside its activations.
_FOLLOWED = 2


class _UnitTracker(WorkspaceTracker):  # type: ignore[no-untyped-call]
    """Follows several units, each under a lease of its own.

    Of tensors made before, parameters outside of the registered state and tensors on a GPU count from their first use on;
    other tensors on the host, such as data, do not.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Met before the call: a result may be a view of a whole data set.
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._track(leaf, None if isinstance(leaf, nn.Parameter) or leaf.is_cuda else 0)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def bytes_of(self, tensor: Tensor) -> int:
        """Return the bytes that count for a tensor's storage now."""
        return self._seen.get(tensor.untyped_storage()._cdata, (0, None))[0]  # noqa: SLF001

    def begin(self, lease: Lease, granted_bytes: int, state: Iterable[Tensor]) -> None:
        """Begin a unit; `state` has the tensors with room on the lease already."""
        self._lease, self._granted_bytes = lease, granted_bytes
        for tensor in state:
            key = tensor.untyped_storage()._cdata  # noqa: SLF001 - the storage's identity
            before = self.current_bytes
            if key in self._seen:
                # Made by an earlier unit, and in a block of the state since.
                nbytes, reference = self._seen[key]
                self._seen[key], self._current_bytes = (0, reference), before - nbytes
            else:
                self.know(tensor)
        self.forget_peak()


class LoopUnitMemory:
    """The room of a loop's units.

    Args:
        state: returns the tensors that have room as registered state: parameters, buffers, and optimizer state.
        sees_operators: whether a mode may follow the loop; else only what autograd saves is seen.

    Attributes:
        workspace_bytes, passes_gate: as of `BurstSteps`.
        device: device of the present or last unit.
        has_followed: whether the present or last unit is followed.
    """

    passes_gate = False

    def __init__(self, state: Callable[[], Iterable[Tensor]], *, sees_operators: bool) -> None:
        self.workspace_bytes = 0
        self.device: Device | None = None
        self.has_followed = False
        self._state, self._sees_operators = state, sees_operators
        self._lease: Lease | None = None
        self._tracker: _UnitTracker | None = None
        self._num_followed = 0

    @property
    def is_held(self) -> bool:
        """Whether a burst is under way."""
        return self._lease is not None

    @contextmanager
    def held(self, lease: Lease, device: Device) -> Iterator[None]:
        """As of `BurstSteps`."""
        self._lease, self.device = lease, device
        try:
            yield
        finally:
            self._lease = None

    @contextmanager
    def unit(self) -> Iterator[None]:
        """Context of the loop's code in a unit, which `held` surrounds.

        Raises:
            BudgetError: from an operator without room for its results.
            TaskError: a followed unit ends within a dispatch mode or an inference mode of the loop's own.
        """
        assert self._lease is not None
        assert self.device is not None
        self.has_followed = self._num_followed < _FOLLOWED
        if not self.has_followed:
            yield
            return
        self._num_followed += 1
        tracker = self._tracker = self._tracker or _UnitTracker(self._lease, 0, self.device.alignment)
        tracker.begin(self._lease, self.workspace_bytes, self._state())
        if self._sees_operators:
            tracker.__enter__()  # type: ignore[no-untyped-call]
        else:
            # Under autocast, kernels that call others inside round differently where a mode follows.
            storages = {tensor.untyped_storage()._cdata for tensor in self._state()}  # noqa: SLF001
            saved = LazySavedTensorSpiller(
                self.device,
                lambda t: t.untyped_storage()._cdata in storages,  # noqa: SLF001
                lambda t: tracker.follow(t.detach()),
            )
            hooks = saved.hooks()
            hooks.__enter__()
        is_inference = torch.is_inference_mode_enabled()
        try:
            yield
        finally:
            if not self._sees_operators:
                hooks.__exit__(None, None, None)
            elif _get_current_dispatch_mode() is tracker:
                tracker.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            else:
                raise TaskError(
                    "loop.step() was called within a TorchDispatchMode that the loop entered before; leave the mode before "
                    "each loop.step()"
                )
            if torch.is_inference_mode_enabled() != is_inference:
                # The end of inference mode would bring the dispatch mode of this unit back.
                raise TaskError(
                    "loop.step() was called within torch.inference_mode() in one of the first two units, which are measured; "
                    "leave the inference mode before loop.step(), or use torch.no_grad()"
                )
            # What became state of the optimizer meanwhile gets a block of its own.
            made_bytes = sum(map(tracker.bytes_of, self._state()))
            self.workspace_bytes = max(self.workspace_bytes, tracker.peak_bytes - made_bytes)
