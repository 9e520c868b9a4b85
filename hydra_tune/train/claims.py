"""Claims of trials on trained objects: two trials training the same object would change each other's numbers.

A trial claims the module, the optimizer, and the memory of the parameters. Untrained memory may be shared, such as the frozen
vectors of an embedding in a dozen trials. `Trial` (`trial.py`) makes the claim as soon as the module is built, or `LoopTrial`
(`own_loop/loop_trial.py`) once the loop has registered the module, and gives the claim up when the trial is closed. The pool
sets `is_ending` through `Trial.set_ending`. `TensorGroups` (`state/tensor_groups.py`) notes parameters whose last values were
given up (`note_lost`).

Note: a new claim may wait up to a minute for each trial that is ending. The wait leaves the capture gate, and holds no lock.
"""

import threading
import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from hydra_tune.errors import TaskError
from hydra_tune.shard.capture.capture_lock import GATE

_LOCK = threading.Lock()
# Weak: a claim that is never given up ends with its trial.
_UNDER_WAY: "weakref.WeakSet[TrialClaim]" = weakref.WeakSet()
# Trained parameters whose last values are gone with the memory of a trial without a result.
_LOST: WeakIdKeyDictionary = WeakIdKeyDictionary()
_PATIENCE_SECONDS = 60.0  # for the end of another trial, which takes about a second for each GiB
_REMEDY = "let model= build its own each time, e.g. with copy.deepcopy(...) or tensor.clone()"


class TrialClaim:
    """A trial's claim on its module, its optimizer, and the memory of its parameters.

    Args:
        module: the trial's module.

    Attributes:
        module: as given; None once the claim is given up.
        optimizer: the trial's optimizer, once built.
        parameters: the module's parameters by name. Other trials read these and not the module, whose attributes its own trial
            may be writing at the same time.
        storages: storages of the parameters by name, and whether each parameter is trained.
        is_ending: whether the trial may be given up soon; trials that claim the same then wait for the end.

    Raises:
        TaskError: another trial under way has the same module; or has one of its parameters, or the memory of one, and one of
            the two trials trains the parameter; or a trial that ended without a result has trained a parameter.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: nn.Module | None = module
        self.optimizer: torch.optim.Optimizer | None = None
        self.parameters: dict[str, nn.Parameter] = {}
        self.storages: dict[str, tuple[StorageWeakRef, bool]] = {}
        self.is_ending, self._over = False, threading.Event()
        while (ending_claim := self._entered(module)) is not None:
            # The other trial's result is handed over at this moment, or that trial waits for its loader. The hand-over may
            # wait for updates on the host, which wait for a capture, which waits for whoever is inside the gate.
            with GATE.left():
                if not ending_claim._over.wait(_PATIENCE_SECONDS):  # noqa: SLF001 - of the same class
                    ending_claim.is_ending = False

    def _entered(self, module: nn.Module) -> "TrialClaim | None":
        """Enter the claim; return the claim of an ending trial for which this one has to wait first, or None.

        Raises:
            TaskError: as of the class.
        """
        self.parameters = dict(module.named_parameters())
        # A weak reference keeps the storage's address reserved, even after a trial has moved the bytes and the storage
        # is gone. Looked up at each attempt, because a hand-over gives the parameters other memory.
        self.storages = {
            name: (StorageWeakRef(parameter.untyped_storage()), parameter.requires_grad)  # type: ignore[no-untyped-call]
            for name, parameter in self.parameters.items()
            if _has_memory(parameter)
        }
        # Check and entry under one lock: of two trials built at once, one must see the other.
        with _LOCK:
            lost_name = next((name for name, parameter in self.parameters.items() if _is_lost(parameter)), None)
            if lost_name is not None:
                raise TaskError(
                    f"parameter {lost_name!r} of the module that model= returned has lost its values with an earlier trial, "
                    f"which was pruned, has failed, or was run for a plan; {_REMEDY}"
                )
            for other in _UNDER_WAY:
                try:
                    self._check(other)
                except TaskError:
                    if not other.is_ending:
                        raise
                    return other
            _UNDER_WAY.add(self)
        return None

    def _check(self, other: "TrialClaim") -> None:
        assert self.module is not None
        if other.module is self.module:
            raise TaskError(f"model= returned a module that another trial is training; {_REMEDY}")
        claimed_storages: dict[int, tuple[str, bool]] = {
            reference.cdata: (name, is_trained) for name, (reference, is_trained) in other.storages.items()
        }
        # A trial under way moves the bytes of its parameters, so only the object identifies a parameter.
        claimed_objects = {
            id(parameter): (name, parameter.requires_grad) for name, parameter in other.parameters.items()
        }
        for name, parameter in self.parameters.items():
            claimed = claimed_objects.get(id(parameter))
            if claimed is None and name in self.storages:
                claimed = claimed_storages.get(self.storages[name][0].cdata)
            if claimed is not None and (parameter.requires_grad or claimed[1]):
                raise TaskError(
                    f"parameter {name!r} of the module that model= returned shares memory with {claimed[0]!r} of a trial "
                    f"under way, and each trial would change the other's numbers; {_REMEDY}"
                )

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Claim the trial's optimizer as well.

        Raises:
            TaskError: another trial under way has the optimizer.
        """
        with _LOCK:
            if any(other.optimizer is optimizer for other in _UNDER_WAY if other is not self):
                raise TaskError(
                    "optimizer= returned an optimizer that another trial is using; let optimizer= build a new one each time, "
                    "e.g. optimizer=partial(AdamW, lr=1e-3)"
                )
            self.optimizer = optimizer

    def give_up(self) -> None:
        """Give up the claim when the trial is over."""
        with _LOCK:
            _UNDER_WAY.discard(self)
            self.module, self.optimizer, self.parameters, self.storages = None, None, {}, {}
        self._over.set()


def note_lost(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse further trials of trained parameters whose last values have been given up, unless they get other memory."""
    with _LOCK:
        for parameter in parameters:
            _LOST[parameter] = StorageWeakRef(parameter.untyped_storage())  # type: ignore[no-untyped-call]


def _is_lost(parameter: nn.Parameter) -> bool:
    """Whether a parameter has the memory in which an earlier trial has left the parameter without values."""
    # A weak reference keeps the address of the storage, so other memory has another address.
    return parameter in _LOST and _LOST[parameter] == StorageWeakRef(parameter.untyped_storage())  # type: ignore[no-untyped-call]


def _has_memory(parameter: nn.Parameter) -> bool:
    """Whether a parameter has bytes of its own: lazy, sparse and empty parameters, and parameters without data, have none."""
    if is_lazy(parameter) or parameter.layout is not torch.strided or not parameter.numel():
        return False
    return parameter.untyped_storage().device.type != "meta"
