"""The pilot of a step that cannot be captured: real runs of copies of the model, on the host.

Code that depends on values cannot run on fake tensors. The pilot therefore runs the step in the way of its unit, keeping
or spilling its activations, while a tracker follows the storages made by the step. Before a run that spills, another run,
without a tracker, checks each host copy. `whole_plan` (`shard/execute/eager_plan.py`) calls `EagerPilot` while making the
plan of such a step. The pilot runs copies of the trial's model alone, and must run a step as `EagerStep` does, or the
peak is another. The module must not know the pager, and reads no clock.

Note: the runs are runs of the user's own code. `PlanLibrary` (`shard/partition/plan_cache.py`) holds the gate alone
meanwhile, and puts back changes of Python values that the library can follow; the pilot itself restores the random streams.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.device import Device
from hydra_tune.errors import CaptureError, TaskError
from hydra_tune.memory.activation_offload import PackedSavedTensor, SavedStorageCopy, SavedTensorSpiller
from hydra_tune.shard.analysis.module_mutation import check_state
from hydra_tune.shard.capture import batch as batches
from hydra_tune.shard.capture.batch import same_bits
from hydra_tune.shard.capture.precision import eager_autocast
from hydra_tune.shard.capture.step_capture import copied_model, describe, named_state
from hydra_tune.shard.capture.step_module import step_module
from hydra_tune.shard.cost.pilot import StorageTracker, quiet_collector
from hydra_tune.shard.partition.gradient_rules import GradientRules
from hydra_tune.shard.verify.process_state import preserved_streams
from hydra_tune.shard.verify.step_outcome import refuse_sparse
from hydra_tune.task import TrainTask


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerCost:
    """Measurements of a run.

    Attributes:
        workspace: peak of the bytes made by the step.
        spilled_bytes: peak of the host memory for spilled activations.
    """

    names: tuple[str, ...]
    workspace: int
    spilled_bytes: int = 0


class EagerPilot:
    """Measures a step of a model; the random streams are restored.

    Args:
        model: the trial's module; only copied.
        alignment: bytes to which the devices align allocations.
    """

    def __init__(
        self, task: TrainTask, model: nn.Module, leaves: batches.BatchLeaves, mode: str, alignment: int
    ) -> None:
        self._task = task
        self._model = model
        self._leaves = leaves
        self._mode = mode
        self._alignment = alignment

    def keeping(self, twin: nn.Module) -> EagerCost:
        """Measure a run that keeps its activations on the device.

        `twin`, a copy of the model, is left in an undefined state.
        """
        tracker = StorageTracker(self._alignment)
        names = self._run(twin, self._batch(), tracker, nullcontext())
        return EagerCost(names=names, workspace=tracker.peak_bytes)

    def spilling(self) -> EagerCost:
        """Measure a run that spills its activations to the host.

        Raises:
            CaptureError: the step does not allow spilling.
        """
        # In a separate run: the comparison keeps the originals alive and would falsify the peak.
        self._check()
        with _host() as device:
            twin, batch = copied_model(self._model), self._batch()
            spiller = SavedTensorSpiller(device, _owned(twin, batch))
            tracker = StorageTracker(self._alignment)
            names = self._run(twin, batch, tracker, spiller.hooks())
        return EagerCost(names=names, workspace=tracker.peak_bytes, spilled_bytes=spiller.peak_bytes)

    def _check(self) -> None:
        """Run the step once, comparing each copy with the tensor that a backward without copies would read."""
        with _host() as device:
            twin, batch = copied_model(self._model), self._batch()
            try:
                self._run(twin, batch, nullcontext(), _SavedTensorVerifier(device, _owned(twin, batch)).hooks())
            except CaptureError:
                raise
            except Exception as error:
                raise CaptureError(describe(error)) from error

    def _batch(self) -> Any:
        return self._leaves.rebuild(tuple(tensor.clone() for tensor in self._leaves.tensors))

    def _run(
        self,
        twin: nn.Module,
        batch: Any,
        tracker: AbstractContextManager[object],
        saving: AbstractContextManager[object],
    ) -> tuple[str, ...]:
        """Run a step in the way of its unit; return the names of its results."""
        training = self._mode == "train"
        wrapper = step_module(self._task, twin, self._mode)
        state = dict(named_state(twin))
        with preserved_streams(), quiet_collector(), torch.set_grad_enabled(training), tracker, saving:
            if isinstance(tracker, StorageTracker):
                # Operands count as blocks, and the workspace is the rest.
                tracker.know(*twin.parameters(), *twin.buffers(), *batches.flatten(batch).tensors)
            with eager_autocast(self._task.precision):
                results = wrapper(batch)
            if training:
                # Copied as in a backward unit, so that the peak includes the copy.
                loss_copy = results["loss"].detach().clone()
                with _naming_saved_buffers(wrapper):
                    GradientRules.of(self._task).objective(results["loss"]).backward()  # type: ignore[no-untyped-call]
                del loss_copy
                refuse_sparse({name: p.grad for name, p in twin.named_parameters() if p.grad is not None})
        check_state(state, twin)
        return tuple(results)


class _SavedTensorVerifier(SavedTensorSpiller):
    """Keeps each packed tensor, and compares a tensor that was copied with its copy when the backward reads the tensor."""

    def __init__(self, device: Device, stays: Callable[[Tensor], bool]) -> None:
        super().__init__(device, stays)
        self._originals: dict[int, tuple[PackedSavedTensor, Tensor]] = {}

    def pack(self, tensor: Tensor) -> PackedSavedTensor:
        packed = super().pack(tensor)
        # With the packed tensor itself, so that its id is not used again during the step.
        self._originals[id(packed)] = (packed, tensor.detach())
        return packed

    def unpack(self, packed: PackedSavedTensor) -> Tensor:
        """Return a packed tensor for the backward.

        Raises:
            CaptureError: the tensor was overwritten after the forward had saved the tensor, unseen by autograd.
        """
        tensor = super().unpack(packed)
        copied = packed.bytes
        if isinstance(copied, SavedStorageCopy):
            original = self._originals[id(packed)][1]
            if not same_bits(original, packed.geometry.view(copied.host.untyped_storage())):
                raise CaptureError(
                    "it overwrites a tensor that its backward reads in a way that autograd does not see, e.g. through "
                    ".data or .numpy()"
                )
        return tensor


@contextmanager
def _naming_saved_buffers(wrapper: nn.Module) -> Iterator[None]:
    """Name the buffer in an error of a backward that reads a buffer which the forward has replaced.

    Raises:
        TaskError: as said.
    """
    try:
        yield
    except RuntimeError as error:
        replaced = getattr(wrapper, "replaced", ())
        if not replaced or "modified by an inplace operation" not in str(error):
            raise
        raise TaskError(
            f"the forward reads the buffer {' or '.join(map(repr, replaced))} and then replaces the buffer, but the backward "
            "needs the values that the forward has read; a model that is cut, fused or runs whole writes the new values into "
            "the tensor of the buffer. Let the forward read a copy (self.name.clone()), or raise device_memory until the "
            "trial runs as it is"
        ) from error


@contextmanager
def _host() -> Iterator[Device]:
    """A CPU device for host copies, for the length of a run."""
    # Without a budget, because the device only copies and no ledger counts its bytes.
    device = CpuDevice(0, 0)
    try:
        yield device
    finally:
        device.close()


def _owned(twin: nn.Module, batch: Any) -> Callable[[Tensor], bool]:
    """Return a test for tensors in the memory of a unit's operands: the state or the batch."""
    operands = (*twin.parameters(), *twin.buffers(), *batches.flatten(batch).tensors)
    storages = {tensor.untyped_storage()._cdata for tensor in operands}  # noqa: SLF001 - the storage's identity
    return lambda tensor: tensor.untyped_storage()._cdata in storages  # noqa: SLF001
