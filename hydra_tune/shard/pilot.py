"""The pilot: how many bytes a shard's units need, found by running the units themselves on fake tensors.

The same functions that will run for real run here under `FakeTensorMode`, while a tracker follows the storages they make;
nothing is allocated. What a unit is given (parameters, values, gradients) is counted by the bytes of the blocks that will
hold it; what it makes beyond that is its workspace. RNN workspaces inside a kernel are the known exception: fake kernels do
not show them.

Source: HYDRA section 4.1, the pilot runs of Algorithm 1. Differs: there an out-of-memory error of a real pass is the signal.
"""

import copy
import gc
import math
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hydra_tune.shard import compute
from hydra_tune.shard.alike import Likenesses
from hydra_tune.shard.analysis import Analysis, placeholders
from hydra_tune.shard.capture import Captured, StateSpec
from hydra_tune.shard.kept import NotKeepableError
from hydra_tune.shard.rules import GradientRules
from hydra_tune.shard.split import ShardGraph, cut_shard
from hydra_tune.shard.workspace import with_workspace


def aligned(size: int, alignment: int) -> int:
    """`size` rounded up to a multiple of `alignment`, in bytes."""
    return -(-size // alignment) * alignment


class _StorageReference(weakref.ref[torch.UntypedStorage]):
    """A weak reference that knows which storage it was."""

    __slots__ = ("storage",)
    storage: int


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the bytes of all storages made while it is active, and their peak.

    A storage counts from the first operator that returns it until it is freed. Storages marked as known before do not
    count. A storage may be freed on any thread, at any moment: its finalizer leaves a note for the next look.
    """

    def __init__(self, alignment: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._alignment = alignment
        self._current_bytes = 0
        self._seen: dict[int, tuple[int, _StorageReference]] = {}
        self._freed: deque[_StorageReference] = deque()

    @property
    def current_bytes(self) -> int:
        """Bytes of the storages that are alive now."""
        while self._freed:
            self._current_bytes -= self._seen.pop(self._freed.popleft().storage)[0]
        return self._current_bytes

    def know(self, *tensors: Tensor) -> None:
        """Leave the storages of these tensors out of the count."""
        for tensor in tensors:
            self._track(tensor, size=0)

    def follow(self, *tensors: Tensor) -> None:
        """Count the storages of these tensors from now on, though they were made before."""
        for tensor in tensors:
            self._track(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = with_workspace(func, args, func(*args, **(kwargs or {})))
        if isinstance(result, Tensor):  # most are: this runs for every operator of the user's own code
            self._track(result)
        else:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._track(leaf)
        return result

    def _track(self, tensor: Tensor, size: int | None = None) -> None:
        if tensor.layout not in (torch.strided, torch.jagged):
            for part in stored_parts(tensor):
                self._track(part, size)
            return
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - the storage's identity
        before = self.current_bytes  # notes are read first: a freed storage's identity may be another's by now
        if key in self._seen:
            return
        nbytes = aligned(storage.nbytes(), self._alignment) if size is None else size
        reference = _StorageReference(storage, self._freed.append)
        reference.storage = key
        self._seen[key] = (nbytes, reference)
        self._current_bytes = before + nbytes
        self.peak_bytes = max(self.peak_bytes, self._current_bytes)


def stored_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """A tensor itself, or those that a sparse one is made of, which has no storage; none where torch does not tell them."""
    if tensor.layout in (torch.strided, torch.jagged):
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()  # noqa: SLF001 - the others copy, or want it to be coalesced
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Keep the garbage collector off: it frees at random moments, which would blur a peak."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCost:
    """Bytes that one shard's units need at once on a device.

    Attributes:
        state_bytes: parameters and buffers used.
        value_bytes: batch tensors, constants and live-ins, as they lie on the device during a unit.
        handed_bytes: gradients of values, handed in by later shards.
        optimizer_bytes: optimizer state of the parameters whose update ends here.
        forward_workspace: bytes made during the forward unit, outputs included (0 for a shard that has none).
        backward_workspace: bytes made during the backward unit, parameter gradients included.
        update_workspace: bytes made during an update, beyond parameters, gradients and optimizer state.
        first_update_workspace: the same for the first update, which makes the optimizer state.
        trained_bytes: gradients of the parameters whose update ends here.
        phased: whether these gradients wait for others before the update.
        spilled_bytes: host memory for the activations that the backward unit spills; 0 if it keeps them all.
        updates_on_host: whether optimizer state stays on the host, and updates are made there.
        kept_bytes: activations that the forward unit keeps for the backward unit; 0 if that recomputes them.
        kept_blocks: storages that these activations lie on.
        recompute_workspace: bytes made during the backward unit if it recomputes after all; 0 if it always does.
        input_bytes: of `value_bytes`, those of batch tensors and constants, which stay until the step lets the batch go.
        summed_bytes: gradients of these parameters that earlier batches of the step leave; 0 if it has one batch.
    """

    state_bytes: int
    value_bytes: int
    handed_bytes: int
    optimizer_bytes: int
    forward_workspace: int
    backward_workspace: int
    update_workspace: int
    first_update_workspace: int
    trained_bytes: int
    phased: bool = False
    spilled_bytes: int = 0
    updates_on_host: bool = False
    kept_bytes: int = 0
    kept_blocks: int = 0
    recompute_workspace: int = 0
    summed_bytes: int = 0
    input_bytes: int = 0

    @property
    def gradient_bytes(self) -> int:
        """Gradients that come in backward: those of values, and the sums of parameters'."""
        return self.handed_bytes + self.summed_bytes

    @property
    def held_bytes(self) -> int:
        """The most that may lie on the host between the shard's units: values, gradients, activations, optimizer state."""
        waiting = self.trained_bytes if self.phased or self.updates_on_host else 0
        activations = self.spilled_bytes + self.kept_bytes
        return self.value_bytes + self.gradient_bytes + waiting + self.optimizer_bytes + activations

    @property
    def forward_bytes(self) -> int:
        """Peak of the forward unit."""
        return self.state_bytes + self.value_bytes + self.forward_workspace

    @property
    def backward_bytes(self) -> int:
        """Peak of the backward unit, recompute included."""
        workspace = max(self.kept_bytes + self.backward_workspace, self.recompute_workspace)
        return self.state_bytes + self.value_bytes + self.gradient_bytes + workspace

    @property
    def update_bytes(self) -> int:
        """Peak of the update unit."""
        if self.updates_on_host:
            return 0
        base = self.state_bytes + self.trained_bytes
        return base + max(self.optimizer_bytes + self.update_workspace, self.first_update_workspace)

    @property
    def peak_bytes(self) -> int:
        """The most any of the shard's units needs."""
        return max(self.forward_bytes, self.backward_bytes, self.update_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """What the runs of a candidate have shown, which is so for all that are like it; bytes as of `ShardCost`."""

    forward: int
    backward: int
    handed_bytes: int
    value_bytes: int
    input_bytes: int


UpdatePilot = Callable[[Sequence[str]], tuple[int, int, int]]
"""Names of parameters -> bytes of their optimizer state, workspace of a later update, workspace of the first one."""


class Pilot:
    """Measures candidate shards of one captured step.

    Args:
        captured: the step.
        analysis: its facts.
        specs: the model's state.
        batch: the tensors of a batch, for their geometry.
        update: measures an optimizer update; None for evaluation.
        alignment: bytes to which a device aligns its allocations.
        groups: names of the state -> all the names that are loaded with it, where the trial's state is grouped already; a
            name that is not there is loaded alone.
        rules: what is done with gradients.
        updates_on_host: whether updates are made on the host.
    """

    def __init__(
        self,
        captured: Captured,
        analysis: Analysis,
        specs: dict[str, StateSpec],
        batch: tuple[Tensor, ...],
        *,
        update: UpdatePilot | None,
        alignment: int,
        groups: Mapping[str, frozenset[str]] | None = None,
        rules: GradientRules | None = None,
        updates_on_host: bool = False,
    ) -> None:
        self._updates_on_host = updates_on_host
        self._groups = groups or {}
        self._rules = rules or GradientRules()
        self._captured = captured
        self._analysis = analysis
        self._specs = specs
        self._alignment = alignment
        self._update = update
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._inputs = placeholders(captured, specs, batch, self._mode)
        self._batch = {index: self._inputs[name] for name, index in captured.inputs.items()}
        self._state: dict[str, Tensor] = {name: self._inputs[p] for p, name in captured.state.items()}
        self._uses = _uses_of_state(captured)
        self._costs: dict[tuple[int, int], ShardCost] = {}
        self._runs: dict[Hashable, _Runs] = {}
        self._likenesses: Likenesses | None = None

    def placed(self, *, updates_on_host: bool) -> "Pilot":
        """One of the same step for updates there, which shares what this one has run and will run."""
        if updates_on_host == self._updates_on_host:
            return self
        other = copy.copy(self)
        other._updates_on_host, other._costs = updates_on_host, {}  # noqa: SLF001 - a copy of its own
        return other

    def cost(self, first: int, last: int) -> ShardCost:
        """Bytes of the shard of nodes `first` to `last`; measured once."""
        key = (first, last)
        if key not in self._costs:
            self._costs[key] = self._measure(first, last)
        return self._costs[key]

    def cost_keeping(self, first: int, last: int) -> ShardCost | None:
        """The same with the activations kept from the forward unit to the backward unit; None if they cannot be."""
        shard = cut_shard(self._captured, self._analysis, first, last)
        try:
            made, kept, backward = self._measure_keeping(shard)
        except NotKeepableError:
            return None
        cost = self.cost(first, last)
        saved = sum(self._size(self._state[name]) for name in shard.saved_state)
        scratch = self._rules.scratch_bytes(len(self.trained_here(shard)), self._alignment)
        return replace(
            cost,
            forward_workspace=made + saved,
            backward_workspace=backward + saved + scratch,
            kept_bytes=sum(kept),
            kept_blocks=len(kept),
            recompute_workspace=cost.backward_workspace,
        )

    def try_forward(self, shard: ShardGraph) -> int:
        """Run a shard's forward on fake tensors; returns the bytes of all that it makes, one after the other."""
        operands = self._operands(shard)
        with self._mode:
            compute.forward(shard, operands, self._needs_gradient(shard) if self._captured.mode == "train" else None)
        values = (node.meta.get("val") for node in self._captured.nodes[shard.first : shard.last])
        return sum(value.numel() * value.dtype.itemsize for value in values if isinstance(value, Tensor))

    def trained_here(self, shard: ShardGraph) -> list[str]:
        """Parameters whose gradient is complete after this shard's backward: those no earlier shard uses."""
        return self._trained(shard.state, shard.first)

    def requires_grad(self, name: str) -> bool:
        """Whether a parameter is trained at all."""
        return self._specs[name].requires_grad

    def _trained(self, state: Sequence[str], first: int) -> list[str]:
        return [name for name in state if self._specs[name].requires_grad and self._uses[name] >= first]

    def _measure(self, first: int, last: int) -> ShardCost:
        if self._likenesses is None:
            self._likenesses = Likenesses(self._captured, self._analysis, self._inputs)
        alike = self._likenesses.of(first, last)
        runs = self._runs.get(alike.key) if alike.key is not None else None
        if runs is None:
            runs = self._run(cut_shard(self._captured, self._analysis, first, last))
            if alike.key is not None:
                self._runs[alike.key] = runs
        training = self._captured.mode == "train"
        trained = self._trained(alike.state, first) if training else []
        trained_bytes = sum(self._size(self._state[name]) for name in trained)
        scratch = self._rules.scratch_bytes(len(trained), self._alignment)
        state_bytes, later, first_update = self._update(trained) if self._update and trained else (0, 0, 0)
        if self._update and trained and self._groups:
            # The optimizer's state is loaded by groups as well.
            state_bytes = self._update([n for n in self._loaded(trained) if self._specs[n].requires_grad])[0]
        return ShardCost(
            state_bytes=sum(self._spec_bytes(name) for name in self._loaded(alike.state)),
            value_bytes=runs.value_bytes,
            input_bytes=runs.input_bytes,
            handed_bytes=runs.handed_bytes,
            optimizer_bytes=state_bytes,
            forward_workspace=runs.forward,
            backward_workspace=runs.backward + scratch if training else 0,
            update_workspace=later + scratch,
            first_update_workspace=first_update + scratch,
            trained_bytes=trained_bytes,
            phased=self._rules.has_two_phases or self._rules.accumulates,
            updates_on_host=self._updates_on_host,
            summed_bytes=trained_bytes if self._rules.accumulates else 0,
        )

    def _run(self, shard: ShardGraph) -> "_Runs":
        """Forward and backward of a candidate."""
        operands = self._operands(shard)
        values = [*operands.constants, *operands.inputs, *operands.live_in]
        training = self._captured.mode == "train"
        runs_forward = not training or shard.last < len(self._captured.nodes)
        forward = self._forward(shard, operands) if runs_forward else 0
        saved = sum(self._size(self._state[name]) for name in shard.saved_state)
        copied = sum(
            self._size(self._state[name]) for name in shard.written_state
        )  # to go back to, or to recompute with
        backward, handed_bytes = self._backward(shard, operands) if training else (0, 0)
        return _Runs(
            forward=forward + (saved if training else copied) if runs_forward else 0,
            backward=backward + (saved if runs_forward else 0) + copied,
            handed_bytes=handed_bytes,
            value_bytes=self._storage_bytes(values),
            input_bytes=self._storage_bytes([*operands.constants, *operands.inputs]),
        )

    def _loaded(self, names: Sequence[str]) -> list[str]:
        """What is on the device when these names are: whole groups."""
        return sorted({member for name in names for member in self._groups.get(name, {name})})

    def _spec_bytes(self, name: str) -> int:
        spec = self._specs[name]
        return aligned(math.prod(spec.shape) * spec.dtype.itemsize, self._alignment)

    def _operands(self, shard: ShardGraph) -> compute.Operands:
        """Fake operands; live-ins that share a storage share it here too."""
        with self._mode:
            storages = {
                name: torch.empty(self._analysis.values[name].storage_bytes, dtype=torch.uint8)
                for name in {self._analysis.values[n].storage: n for n in shard.live_in}.values()
            }
        by_storage = {self._analysis.values[name].storage: tensor for name, tensor in storages.items()}
        nodes = {node.name: node for node in self._captured.nodes}
        live_in = []
        for name in shard.live_in:
            value = nodes[name].meta["val"]
            flat = by_storage[self._analysis.values[name].storage]
            with self._mode:
                view = torch.empty(0, dtype=value.dtype).set_(
                    flat.untyped_storage(), value.storage_offset(), value.shape, value.stride()
                )
            live_in.append(view)
        return compute.Operands(
            state=[self._state[name] for name in shard.state],
            constants=[self._inputs[name] for name in shard.constants],
            inputs=[self._batch[index] for index in shard.inputs],
            live_in=live_in,
        )

    def _needs_gradient(self, shard: ShardGraph) -> frozenset[str]:
        return frozenset(name for name in shard.live_in if self._analysis.values[name].requires_grad)

    def _forward(self, shard: ShardGraph, operands: compute.Operands) -> int:
        training = self._captured.mode == "train"

        def run() -> object:
            return compute.forward(shard, operands, self._needs_gradient(shard) if training else None)

        return self._peak(run, operands.all)

    def _backward(self, shard: ShardGraph, operands: compute.Operands) -> tuple[int, int]:
        incoming, handed = self._incoming(shard)

        def run() -> object:
            return compute.backward(
                shard,
                operands,
                needs_gradient=self._needs_gradient(shard),
                incoming=incoming,
                objective=self._rules.objective,
            )

        return self._peak(run, [*operands.all, *handed]), self._storage_bytes(handed)

    def _incoming(self, shard: ShardGraph) -> tuple[compute.Incoming, list[Tensor]]:
        """Gradients as later shards would hand them in."""
        values = self._analysis.values
        nodes = {node.name: node for node in self._captured.nodes}
        results = set(self._captured.outputs)
        outputs: dict[str, Tensor | None] = {}
        live_in: dict[str, Tensor] = {}
        parameters: dict[str, Tensor] = {}
        with self._mode:
            for name in shard.live_out:
                if name in results:
                    outputs[name] = None
                elif values[name].requires_grad:
                    outputs[name] = _gradient_of(nodes[name].meta["val"])
            for name in shard.live_in:
                if values[name].requires_grad and _used_after(nodes[name], shard.last, self._captured):
                    live_in[name] = _gradient_of(nodes[name].meta["val"])
            for name in shard.state:
                if self._specs[name].requires_grad and _state_used_after(name, shard.last, self._captured):
                    parameters[name] = torch.empty_like(self._state[name])
        handed = [g for g in (*outputs.values(), *live_in.values(), *parameters.values()) if g is not None]
        return compute.Incoming(outputs=outputs, live_in=live_in, parameters=parameters), handed

    def _measure_keeping(self, shard: ShardGraph) -> tuple[int, list[int], int]:
        """Bytes that the forward makes, the sizes of what it keeps of them, and bytes the backward makes beyond these."""
        operands = self._operands(shard)
        incoming, handed = self._incoming(shard)
        before, after = StorageTracker(self._alignment), StorageTracker(self._alignment)
        with quiet_collector(), _uncached(self._mode), self._mode:
            before.know(*operands.all)
            with before:
                outputs, tape = compute.taped_forward(shard, operands, self._needs_gradient(shard))
            del outputs
            kept = tape.settle()
            sizes = [self._size(storage) for storage in kept.values()]
            after.know(*operands.all, *handed)
            with after:
                after.follow(*kept.values())
                made = tape.backward(shard, operands, incoming, kept.__getitem__, kept.__delitem__)
            del made
        return before.peak_bytes, sizes, after.peak_bytes - sum(sizes)

    def _peak(self, run: Callable[[], object], given: Sequence[Tensor]) -> int:
        """Peak of what a unit makes; views of what it is given make nothing."""
        tracker = StorageTracker(self._alignment)
        with quiet_collector(), self._mode:
            tracker.know(*given)
            with tracker:
                made = run()
            del made
        return tracker.peak_bytes

    def _size(self, tensor: Tensor) -> int:
        return aligned(tensor.untyped_storage().nbytes(), self._alignment)

    def _storage_bytes(self, tensors: Sequence[Tensor]) -> int:
        storages = {t.untyped_storage()._cdata: self._size(t) for t in tensors}  # noqa: SLF001
        return sum(storages.values())


@contextmanager
def _uncached(mode: FakeTensorMode) -> Iterator[None]:
    """Let fake tensors forget how operators were called: the cache holds each storage that a tensor was set to."""
    cached, mode.cache_enabled = mode.cache_enabled, False
    try:
        yield
    finally:
        mode.cache_enabled = cached


def _gradient_of(value: Tensor) -> Tensor:
    """A gradient as autograd accumulates it on a leaf: in the leaf's own layout where that is dense."""
    if torch.ops.aten.is_non_overlapping_and_dense(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return torch.empty(value.shape, dtype=value.dtype)


def _uses_of_state(captured: Captured) -> dict[str, int]:
    """Canonical name -> position of the first node that uses it."""
    index = {node: position for position, node in enumerate(captured.nodes)}
    first: dict[str, int] = {}
    for node in captured.module.graph.nodes:
        name = captured.state.get(node.name)
        if name is None:
            continue
        for user in node.users:
            if user in index:
                first[name] = min(first.get(name, len(index)), index[user])
    return first


def _used_after(node: Any, position: int, captured: Captured) -> bool:
    later = set(captured.nodes[position:])
    return any(user in later for user in node.users)


def _state_used_after(name: str, position: int, captured: Captured) -> bool:
    later = set(captured.nodes[position:])
    return any(
        user in later
        for node in captured.module.graph.nodes
        if captured.state.get(node.name) == name
        for user in node.users
    )
