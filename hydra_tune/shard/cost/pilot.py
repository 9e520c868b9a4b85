"""The pilot: measures the bytes needed by a shard's units, by running the units on fake tensors.

The pilot runs the very functions of a real run, but under `FakeTensorMode`, while `StorageTracker` follows the storages
made by the functions. Operands of a unit (parameters, values, gradients) count with the bytes of the blocks that will
hold the operands; all further storages made by the unit count as its workspace. Workspaces that a kernel keeps to
itself are the known exception: fake kernels do not show such workspaces, and `workspace.py` adds only those of oneDNN's
recurrent layers.

`PlanLibrary` (`shard/partition/plan_cache.py`) makes a `ShardPilot` for each captured step, and the partitioners
(`shard/partition/partitioner.py`) ask the pilot for the cost of each candidate shard. `shard/partition/partition_planner.py`,
`shard/partition/plan.py`, `activation_policy.py` and `compute_estimate.py` ask about chosen cuts. The modules of `shard/cost/`,
`train/` and `fusion/` read the `ShardCost` of a shard. `StorageTracker` also follows other runs: updates (`update_pilot.py`),
steps without a graph (`eager_pilot.py`), the steps of a trial's own code (`train/loop/workspace_tracker.py`), and the building
of a model (`shard/capture/meta_models.py`). A pilot of fake tensors must read no value.

Source: HYDRA section 4.1, the pilot runs of Algorithm 1. Differs: in the paper, an out-of-memory error of a real pass
is the signal.
"""

import copy
import gc
import math
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hydra_tune.shard.analysis.graph_analysis import GraphAnalysis, placeholders
from hydra_tune.shard.capture.step_capture import CapturedStepGraph, StateSpec
from hydra_tune.shard.cost.workspace import with_workspace
from hydra_tune.shard.execute import compute
from hydra_tune.shard.execute.saved_activations import NotKeepableError
from hydra_tune.shard.fake.geometry_memo import GeometryFakeMode
from hydra_tune.shard.partition.gradient_rules import GradientRules
from hydra_tune.shard.partition.shard_equivalence import ShardSignature, ShardSignatureBuilder
from hydra_tune.shard.partition.subgraph import ShardGraph, cut_shard


def aligned(size: int, alignment: int) -> int:
    """Return `size` rounded up to a multiple of `alignment`, in bytes."""
    return -(-size // alignment) * alignment


class _StorageReference(weakref.ref[torch.UntypedStorage]):
    """A weak reference that remembers the identity of its storage."""

    __slots__ = ("storage",)
    storage: int


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the bytes, and the peak, of all storages made while the tracker is active.

    A storage counts from the first operator that returns the storage until the storage is freed. Storages marked as
    known do not count. A storage may be freed on any thread at any moment, so its finalizer only queues a note for the
    next look at the count.
    """

    def __init__(self, alignment: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._alignment = alignment
        self._current_bytes = 0
        self._seen: dict[int, tuple[int, _StorageReference]] = {}
        # Appending to a deque is atomic, so finalizers on other threads need no lock.
        self._freed: deque[_StorageReference] = deque()

    @property
    def current_bytes(self) -> int:
        """Bytes of the storages alive now."""
        while self._freed:
            self._current_bytes -= self._seen.pop(self._freed.popleft().storage)[0]
        return self._current_bytes

    def know(self, *tensors: Tensor) -> None:
        """Leave the storages of these tensors out of the count."""
        # Followed with a size of 0, so that an operator that returns a view of the storage adds nothing.
        for tensor in tensors:
            self._track(tensor, size=0)

    def follow(self, *tensors: Tensor) -> None:
        """Count the storages of these tensors from now on, although the storages were made before."""
        for tensor in tensors:
            self._track(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = with_workspace(func, args, func(*args, **(kwargs or {})))
        # The fast path: most results are a single tensor, and this code runs for every operator of the user's code.
        if isinstance(result, Tensor):
            self._track(result)
        else:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._track(leaf)
        return result

    def _track(self, tensor: Tensor, size: int | None = None) -> None:
        if tensor.layout not in (torch.strided, torch.jagged):
            # A sparse tensor has no storage of its own; its parts have.
            for part in stored_parts(tensor):
                self._track(part, size)
            return
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - the storage's identity
        before = self.current_bytes  # notes first: another storage may already have the identity of a freed storage
        if key in self._seen:
            return
        nbytes = aligned(storage.nbytes(), self._alignment) if size is None else size
        reference = _StorageReference(storage, self._freed.append)
        reference.storage = key
        self._seen[key] = (nbytes, reference)
        self._current_bytes = before + nbytes
        self.peak_bytes = max(self.peak_bytes, self._current_bytes)


def stored_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Tensors that hold the storage of a tensor: the tensor itself, or the parts of a sparse tensor.

    Empty for layouts whose parts torch does not expose.
    """
    if tensor.layout in (torch.strided, torch.jagged):
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()  # noqa: SLF001 - the public accessors copy, or want it coalesced
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Context that disables the garbage collector, which frees at random moments and would blur a peak."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCost:
    """Bytes that a shard's units need at once on a device.

    Attributes:
        state_bytes: parameters and buffers used.
        value_bytes: batch tensors, constants and live-ins, as stored on the device during a unit.
        handed_bytes: gradients of values, handed in by later shards.
        optimizer_bytes: optimizer state of the parameters updated after this shard's backward.
        forward_workspace: bytes made during the forward unit, outputs included (0 for a shard without a forward unit).
        backward_workspace: bytes made during the backward unit, parameter gradients included.
        update_workspace: bytes made during an update, beyond parameters, gradients and optimizer state.
        first_update_workspace: the same for the first update, which creates the optimizer state.
        trained_bytes: gradients of the parameters updated after this shard's backward.
        phased: whether the gradients wait for other gradients before the update.
        spilled_bytes: host memory for activations spilled by the backward unit; 0 if all stay on the device.
        updates_on_host: whether optimizer state stays on the host and updates run there.
        kept_bytes: activations kept by the forward unit for the backward unit; 0 if the backward unit recomputes.
        kept_blocks: number of storages under the kept activations.
        recompute_workspace: bytes made during the backward unit if the unit recomputes after all; 0 if the unit always
            recomputes.
        input_bytes: part of `value_bytes` for batch tensors and constants, which stay until the step releases the
            batch.
        summed_bytes: gradients of the same parameters left by earlier batches of the step; 0 for a single batch.
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
        """Gradients that enter the backward unit: gradients of values, and sums of parameter gradients."""
        return self.handed_bytes + self.summed_bytes

    @property
    def held_bytes(self) -> int:
        """Most bytes on the host between the shard's units: values, gradients, activations, optimizer state."""
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
        # A unit planned to keep may recompute at run time (see `shard/execute/chain.py`), so the larger of the two
        # must fit.
        workspace = max(self.kept_bytes + self.backward_workspace, self.recompute_workspace)
        return self.state_bytes + self.value_bytes + self.gradient_bytes + workspace

    @property
    def update_bytes(self) -> int:
        """Peak of the update unit on the device; 0 if updates run on the host."""
        if self.updates_on_host:
            return 0
        base = self.state_bytes + self.trained_bytes
        return base + max(self.optimizer_bytes + self.update_workspace, self.first_update_workspace)

    @property
    def peak_bytes(self) -> int:
        """Most bytes that any of the shard's units needs."""
        return max(self.forward_bytes, self.backward_bytes, self.update_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CandidateRunBytes:
    """Results of a candidate's runs, equal for all candidates alike; bytes as of `ShardCost`."""

    forward: int
    backward: int
    handed_bytes: int
    value_bytes: int
    input_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeepingRunBytes:
    """Results of a candidate's run with activations kept, equal for all candidates alike.

    Attributes:
        forward: bytes made by the forward.
        kept_sizes: sizes of the kept storages among the bytes of the forward.
        backward: bytes made by the backward beyond the kept storages.
        saved_bytes: copies of buffers for a recompute.
    """

    forward: int
    kept_sizes: tuple[int, ...]
    backward: int
    saved_bytes: int


UpdatePilot = Callable[[Sequence[str]], tuple[int, int, int]]
"""Names of parameters -> bytes of their optimizer state, workspace of a later update, workspace of the first update."""


class ShardPilot:
    """Measures candidate shards of a single captured step.

    Args:
        batch: tensors of a batch; only their geometry is used.
        update: measures an optimizer update; None for evaluation.
        alignment: bytes to which a device aligns its allocations.
        groups: name of a state tensor -> all names loaded with it, for a trial with existing groups; a name not listed
            is loaded alone.
    """

    def __init__(
        self,
        captured: CapturedStepGraph,
        analysis: GraphAnalysis,
        specs: dict[str, StateSpec],
        batch: tuple[Tensor, ...],
        *,
        update: UpdatePilot | None,
        alignment: int,
        groups: Mapping[str, frozenset[str]] | None = None,
        rules: GradientRules | None = None,
    ) -> None:
        self._updates_on_host = False
        self._groups = groups or {}
        self._rules = rules or GradientRules()
        self._captured = captured
        self._analysis = analysis
        self._specs = specs
        self._alignment = alignment
        self._update = update
        self._mode = GeometryFakeMode()
        self._inputs = placeholders(captured, specs, batch, self._mode)
        self._batch = {index: self._inputs[name] for name, index in captured.inputs.items()}
        self._state: dict[str, Tensor] = {name: self._inputs[p] for p, name in captured.state.items()}
        self._uses = _uses_of_state(captured)
        self._costs: dict[tuple[int, int], ShardCost] = {}
        self._runs: dict[Hashable, _CandidateRunBytes] = {}
        self._keeping_runs: dict[Hashable, _KeepingRunBytes | None] = {}
        self._likenesses: ShardSignatureBuilder | None = None

    def placed(self, *, updates_on_host: bool) -> "ShardPilot":
        """Return a pilot of the same step for the given place of updates; the two share their runs on fake tensors."""
        if updates_on_host == self._updates_on_host:
            return self
        # The runs do not depend on the place of updates, only the costs derived from the runs do.
        other = copy.copy(self)
        other._updates_on_host, other._costs = updates_on_host, {}  # noqa: SLF001 - a copy of its own
        return other

    def cost(self, first: int, last: int) -> ShardCost:
        """Return the bytes of the shard of the nodes from `first` up to, not including, `last`; measured once."""
        key = (first, last)
        if key not in self._costs:
            self._costs[key] = self._measure(first, last)
        return self._costs[key]

    def cost_keeping(self, first: int, last: int) -> ShardCost | None:
        """Return the cost with activations kept between forward and backward unit; None if keeping is impossible."""
        alike = self._signature(first, last)
        if alike.key is None or alike.key not in self._keeping_runs:
            self._keeping_runs[alike.key] = self._run_keeping(cut_shard(self._captured, self._analysis, first, last))
        runs = self._keeping_runs[alike.key]
        if runs is None:
            return None
        cost = self.cost(first, last)
        # A forward unit that keeps its graph still saves the buffers for a recompute (see `shard/execute/chain.py`).
        scratch = self._rules.scratch_bytes(len(self._trained(alike.state, first)), self._alignment)
        return replace(
            cost,
            forward_workspace=runs.forward + runs.saved_bytes,
            backward_workspace=runs.backward + runs.saved_bytes + scratch,
            kept_bytes=sum(runs.kept_sizes),
            kept_blocks=len(runs.kept_sizes),
            recompute_workspace=cost.backward_workspace,
        )

    def try_forward(self, shard: ShardGraph) -> int:
        """Run a shard's forward on fake tensors; return the total bytes of its nodes' tensors, views included."""
        operands = self._operands(shard)
        with self._mode:
            compute.forward(shard, operands, self._needs_gradient(shard) if self._captured.mode == "train" else None)
        values = (node.meta.get("val") for node in self._captured.nodes[shard.first : shard.last])
        return sum(value.numel() * value.dtype.itemsize for value in values if isinstance(value, Tensor))

    def trained_here(self, shard: ShardGraph) -> list[str]:
        """Parameters with a complete gradient after this shard's backward: parameters not used by any earlier shard."""
        return self._trained(shard.state, shard.first)

    def requires_grad(self, name: str) -> bool:
        """Whether a parameter is trained at all."""
        return self._specs[name].requires_grad

    def _trained(self, state: Sequence[str], first: int) -> list[str]:
        return [name for name in state if self._specs[name].requires_grad and self._uses[name] >= first]

    def _signature(self, first: int, last: int) -> ShardSignature:
        if self._likenesses is None:
            self._likenesses = ShardSignatureBuilder(self._captured, self._analysis, self._inputs)
        return self._likenesses.of(first, last)

    def _measure(self, first: int, last: int) -> ShardCost:
        alike = self._signature(first, last)
        # Equal layers give equal candidates, so a deep model costs about a single run per kind of layer.
        runs = self._runs.get(alike.key) if alike.key is not None else None
        if runs is None:
            runs = self._run(cut_shard(self._captured, self._analysis, first, last))
            if alike.key is not None:
                self._runs[alike.key] = runs
        return self._cost_with(runs, alike, first)

    def least_bytes(self, first: int, last: int) -> int:
        """Return what the shard needs at least: parameters, gradients and optimizer state, without a run of its nodes."""
        no_runs = _CandidateRunBytes(forward=0, backward=0, handed_bytes=0, value_bytes=0, input_bytes=0)
        return self._cost_with(no_runs, self._signature(first, last), first).peak_bytes

    def _cost_with(self, runs: _CandidateRunBytes, alike: ShardSignature, first: int) -> ShardCost:
        training = self._captured.mode == "train"
        trained = self._trained(alike.state, first) if training else []
        trained_bytes = sum(self._size(self._state[name]) for name in trained)
        scratch = self._rules.scratch_bytes(len(trained), self._alignment)
        state_bytes, later, first_update = self._update(trained) if self._update and trained else (0, 0, 0)
        if self._update and trained and self._groups:
            # The pager loads the optimizer state of a group whole, like the group's parameters.
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

    def _run(self, shard: ShardGraph) -> "_CandidateRunBytes":
        """Measure forward and backward of a candidate."""
        operands = self._operands(shard)
        values = [*operands.constants, *operands.inputs, *operands.live_in]
        training = self._captured.mode == "train"
        # The last shard of a training step has no forward unit.
        runs_forward = not training or shard.last < len(self._captured.nodes)
        forward_bytes = self._forward(shard, operands) if runs_forward else 0
        saved_bytes = sum(self._size(self._state[name]) for name in shard.saved_state)
        # Copies of buffers for undoing a failed unit, or for a recompute.
        copied_bytes = sum(self._size(self._state[name]) for name in shard.written_state)
        backward_bytes, handed_bytes = self._backward(shard, operands) if training else (0, 0)
        return _CandidateRunBytes(
            forward=forward_bytes + (saved_bytes if training else copied_bytes) if runs_forward else 0,
            backward=backward_bytes + (saved_bytes if runs_forward else 0) + copied_bytes,
            handed_bytes=handed_bytes,
            value_bytes=self._storage_bytes(values),
            input_bytes=self._storage_bytes([*operands.constants, *operands.inputs]),
        )

    def _loaded(self, names: Sequence[str]) -> list[str]:
        """Names on the device together with `names`: all members of the same groups."""
        return sorted({member for name in names for member in self._groups.get(name, {name})})

    def _spec_bytes(self, name: str) -> int:
        spec = self._specs[name]
        return aligned(math.prod(spec.shape) * spec.dtype.itemsize, self._alignment)

    def _operands(self, shard: ShardGraph) -> compute.ShardOperands:
        """Make fake operands; live-ins with a common storage share a storage here too."""
        # One flat buffer for each storage, under the name of any live-in on the storage.
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
        return compute.ShardOperands(
            state=[self._state[name] for name in shard.state],
            constants=[self._inputs[name] for name in shard.constants],
            inputs=[self._batch[index] for index in shard.inputs],
            live_in=live_in,
        )

    def _needs_gradient(self, shard: ShardGraph) -> frozenset[str]:
        return frozenset(name for name in shard.live_in if self._analysis.values[name].requires_grad)

    def _forward(self, shard: ShardGraph, operands: compute.ShardOperands) -> int:
        training = self._captured.mode == "train"

        def run() -> object:
            return compute.forward(shard, operands, self._needs_gradient(shard) if training else None)

        return self._peak(run, operands.all)

    def _backward(self, shard: ShardGraph, operands: compute.ShardOperands) -> tuple[int, int]:
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

    def _incoming(self, shard: ShardGraph) -> tuple[compute.IncomingGradients, list[Tensor]]:
        """Make the gradients that later shards would hand in, and list the gradients."""
        values = self._analysis.values
        nodes = {node.name: node for node in self._captured.nodes}
        later = set(self._captured.nodes[shard.last :])
        state_used_later = {
            self._captured.state[node.name]
            for node in self._captured.module.graph.nodes
            if node.name in self._captured.state and not later.isdisjoint(node.users)
        }
        results = set(self._captured.outputs)
        outputs: dict[str, Tensor | None] = {}
        live_in: dict[str, Tensor] = {}
        parameters: dict[str, Tensor] = {}
        with self._mode:
            for name in shard.live_out:
                # The backward of a loss starts from the loss itself, without a gradient handed in.
                if name in results:
                    outputs[name] = None
                elif values[name].requires_grad:
                    outputs[name] = _gradient_of(nodes[name].meta["val"])
            for name in shard.live_in:
                if values[name].requires_grad and not later.isdisjoint(nodes[name].users):
                    live_in[name] = _gradient_of(nodes[name].meta["val"])
            for name in shard.state:
                if self._specs[name].requires_grad and name in state_used_later:
                    parameters[name] = torch.empty_like(self._state[name])
        handed = [g for g in (*outputs.values(), *live_in.values(), *parameters.values()) if g is not None]
        return compute.IncomingGradients(outputs=outputs, live_in=live_in, parameters=parameters), handed

    def _run_keeping(self, shard: ShardGraph) -> "_KeepingRunBytes | None":
        """Measure a shard that keeps its activations; None if it cannot."""
        operands = self._operands(shard)
        incoming, handed = self._incoming(shard)
        forward_tracker, backward_tracker = StorageTracker(self._alignment), StorageTracker(self._alignment)
        with suppress(NotKeepableError), quiet_collector(), self._mode:
            forward_tracker.know(*operands.all)
            with forward_tracker:
                outputs, tape = compute.taped_forward(shard, operands, self._needs_gradient(shard))
            del outputs
            if tape.keeps_more:
                return None
            storages = tape.settle()
            sizes = [self._size(storage) for storage in storages.values()]
            # A second tracker: the backward frees storages made in the forward, and the two peaks are wanted apart.
            backward_tracker.know(*operands.all, *handed)
            with backward_tracker:
                backward_tracker.follow(*storages.values())
                gradients = tape.backward(shard, operands, incoming, storages.__getitem__, storages.__delitem__)
            del gradients
            return _KeepingRunBytes(
                forward=forward_tracker.peak_bytes,
                kept_sizes=tuple(sizes),
                backward=backward_tracker.peak_bytes - sum(sizes),
                saved_bytes=sum(self._size(self._state[name]) for name in shard.saved_state),
            )
        return None

    def _peak(self, run: Callable[[], object], given: Sequence[Tensor]) -> int:
        """Peak of the bytes made by a unit; views of the operands do not count."""
        tracker = StorageTracker(self._alignment)
        with quiet_collector(), self._mode:
            tracker.know(*given)
            # Entered last: the tracker then sees each operator first, and the fake tensors that the fake mode returns.
            with tracker:
                results = run()
            del results
        return tracker.peak_bytes

    def _size(self, tensor: Tensor) -> int:
        return aligned(tensor.untyped_storage().nbytes(), self._alignment)

    def _storage_bytes(self, tensors: Sequence[Tensor]) -> int:
        # Views of the same storage count once.
        storages = {t.untyped_storage()._cdata: self._size(t) for t in tensors}  # noqa: SLF001
        return sum(storages.values())


def _gradient_of(value: Tensor) -> Tensor:
    """Make a gradient as autograd accumulates a gradient on a leaf: in the leaf's own layout if dense."""
    if torch.ops.aten.is_non_overlapping_and_dense(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return torch.empty(value.shape, dtype=value.dtype)


def _uses_of_state(captured: CapturedStepGraph) -> dict[str, int]:
    """Canonical name -> position of the first node that uses the state tensor."""
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
