"""Runs a unit on tensors without bytes once, and remembers the geometry of the results: the steps of a rehearsal repeat.

The results of a graph depend only on the geometry of its operands: sizes, strides, types, needs of gradients, and common
storages. `TrialRehearsal` (`train/timing/fake_trial.py`) puts a `MemoizedShardExecutor` into a captured plan before the trial's
steps are rehearsed. A key names a shard by its nodes alone, so an executor must serve a single plan. The module takes no lock,
because a forecast rehearses on one thread.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hydra_tune.memory.block import TensorGeometry, storage_identity
from hydra_tune.shard.capture.step_module import Objective, loss_itself
from hydra_tune.shard.execute import compute
from hydra_tune.shard.execute.compute import IncomingGradients, ShardGradients, ShardOperands, ShardTape
from hydra_tune.shard.partition.subgraph import ShardGraph

_Key = tuple[str, str]
"""Kind and name of a tensor."""


@dataclass(frozen=True, slots=True)
class _ResultLocation:
    """Place of a result: the operand under the result, or the number of the new storage."""

    given: int | None
    new: int
    geometry: TensorGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemoizedResults:
    """Geometry of a run's results.

    Attributes:
        places: places of the tensors, in order.
        sizes: bytes of the new storages.
        freed: numbers of the kept storages freed by the run, in order.
    """

    places: dict[_Key, _ResultLocation]
    sizes: tuple[int, ...]
    freed: tuple[int, ...] = ()

    @staticmethod
    def of(given: Sequence[Tensor], found: Mapping[_Key, Tensor], freed: Sequence[int] = ()) -> "_MemoizedResults":
        """Record the geometry of the results `found`."""
        # Of operands on a common storage the first stands for all, as `again` needs only the storage.
        positions: dict[int, int] = {}
        for position, tensor in enumerate(given):
            positions.setdefault(storage_identity(tensor), position)
        numbers: dict[int, int] = {}
        sizes: list[int] = []
        places = {}
        for key, tensor in found.items():
            storage = storage_identity(tensor)
            if storage not in positions and storage not in numbers:
                numbers[storage] = len(sizes)
                sizes.append(tensor.untyped_storage().nbytes())
            places[key] = _ResultLocation(positions.get(storage), numbers.get(storage, 0), TensorGeometry.of(tensor))
        return _MemoizedResults(places=places, sizes=tuple(sizes), freed=tuple(freed))

    def again(self, given: Sequence[Tensor]) -> dict[_Key, Tensor]:
        """Make the same results for other operands of equal geometry."""
        # Without bytes: the call is made inside the rehearsal's fake mode.
        fresh = [torch.empty(size, dtype=torch.uint8) for size in self.sizes]
        results = {}
        for key, place in self.places.items():
            source = fresh[place.new] if place.given is None else given[place.given]
            results[key] = place.geometry.view(source.untyped_storage(), source.device)
        return results


class MemoizedShardExecutor:
    """Stands in for `shard/execute/compute.py`: runs shards of a single plan on tensors without bytes, once per situation."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _MemoizedResults] = {}

    def forward(
        self, shard: ShardGraph, operands: ShardOperands, needs_gradient: frozenset[str] | None = None
    ) -> dict[str, Tensor]:
        """As `compute.forward`."""

        def run() -> dict[_Key, Tensor]:
            return _named("output", compute.forward(shard, operands, needs_gradient))

        key = ("forward", shard.first, shard.last, needs_gradient)
        return _taken(self._once(key, operands.all, run), "output")

    def taped_forward(
        self, shard: ShardGraph, operands: ShardOperands, needs_gradient: frozenset[str]
    ) -> tuple[dict[str, Tensor], ShardTape]:
        """As `compute.taped_forward`."""

        def tape() -> ShardTape:
            shard_tape = compute.taped_forward(shard, operands, needs_gradient)[1]
            shard_tape.settle()
            return shard_tape

        def run() -> dict[_Key, Tensor]:
            outputs, shard_tape = compute.taped_forward(shard, operands, needs_gradient)
            kept_storages = {str(number): flat for number, flat in shard_tape.settle().items()}
            return _named("output", outputs) | _named("kept", kept_storages)

        key = ("taped", shard.first, shard.last, needs_gradient)
        results = self._once(key, operands.all, run)
        flats = {int(number): flat for number, flat in _taken(results, "kept").items()}
        # No graph is kept: the tape runs the forward again, and only if the backward is not remembered.
        return _taken(results, "output"), _MemoizedShardTape(self, flats, tape)

    def backward(
        self,
        shard: ShardGraph,
        operands: ShardOperands,
        *,
        needs_gradient: frozenset[str],
        incoming: IncomingGradients,
        objective: Objective = loss_itself,
    ) -> ShardGradients:
        """As `compute.backward`."""

        def run() -> dict[_Key, Tensor]:
            gradients = compute.backward(
                shard, operands, needs_gradient=needs_gradient, incoming=incoming, objective=objective
            )
            return _of_gradients(gradients)

        # Without the objective, which changes the value of the loss and no geometry.
        key = ("backward", shard.first, shard.last, needs_gradient, _names(incoming))
        return _gradients(self._once(key, [*operands.all, *_handed(incoming)], run))

    def played(
        self,
        shard: ShardGraph,
        operands: ShardOperands,
        incoming: IncomingGradients,
        flats: Mapping[int, Tensor],
        on_free: Callable[[int], None],
        tape: Callable[[], ShardTape],
    ) -> ShardGradients:
        """Run the backward of a tape, or repeat a remembered run.

        `flats` has the kept storages by number, and `tape` makes a tape that can run.
        """
        operand_tensors = [*operands.all, *_handed(incoming), *flats.values()]
        key = ("played", shard.first, shard.last, _names(incoming), tuple(flats), _likeness(operand_tensors))
        memoized = self._known.get(key)
        if memoized is not None:
            # In the same order as in the run, so that the peak of the rehearsal is right.
            for number in memoized.freed:
                on_free(number)
            return _gradients(memoized.again(operand_tensors))
        freed: list[int] = []

        def free(number: int) -> None:
            freed.append(number)
            on_free(number)

        gradients = tape().backward(shard, operands, incoming, flats.__getitem__, free)
        self._known[key] = _MemoizedResults.of(operand_tensors, _of_gradients(gradients), freed)
        return gradients

    def _once(
        self, key: Hashable, given: Sequence[Tensor], run: Callable[[], dict[_Key, Tensor]]
    ) -> dict[_Key, Tensor]:
        key = (key, _likeness(given))
        memoized = self._known.get(key)
        if memoized is not None:
            return memoized.again(given)
        results = run()
        self._known[key] = _MemoizedResults.of(given, results)
        return results


class _MemoizedShardTape(ShardTape):
    """A tape whose graph is made only if the result is not remembered."""

    def __init__(
        self, remembered: MemoizedShardExecutor, flats: dict[int, Tensor], tape: Callable[[], ShardTape]
    ) -> None:
        self._remembered = remembered
        self._flats = flats
        self._numbers = tuple(flats)
        self._tape = tape

    @override
    def settle(self) -> dict[int, Tensor]:
        # Handed over, so that the tape holds no memory between the two units.
        flats, self._flats = self._flats, {}
        return flats

    @override
    def backward(
        self,
        shard: ShardGraph,
        operands: ShardOperands,
        incoming: IncomingGradients,
        kept: Callable[[int], Tensor],
        on_free: Callable[[int], None],
    ) -> ShardGradients:
        flats = {number: kept(number) for number in self._numbers}
        return self._remembered.played(shard, operands, incoming, flats, on_free, self._tape)


def _likeness(given: Sequence[Tensor]) -> Hashable:
    """Return a key that is equal for operands of equal geometry and equal sharing of storages."""
    numbers: dict[int, int] = {}
    return tuple(
        (
            TensorGeometry.of(tensor),
            tensor.requires_grad,
            # A result may be a view of any part of the storage, also outside the operand.
            tensor.untyped_storage().nbytes(),
            numbers.setdefault(storage_identity(tensor), len(numbers)),
        )
        for tensor in given
    )


def _handed(incoming: IncomingGradients) -> list[Tensor]:
    """Gradients handed over by later shards."""
    parts = (incoming.outputs, incoming.live_in, incoming.parameters)
    return [gradient for part in parts for gradient in part.values() if gradient is not None]


def _names(incoming: IncomingGradients) -> Hashable:
    """Return a key for the names of the incoming gradients."""
    # An output without gradient is a loss, from which the backward starts in another way.
    outputs = tuple((name, gradient is None) for name, gradient in incoming.outputs.items())
    return outputs, tuple(incoming.live_in), tuple(incoming.parameters)


def _named(what: str, tensors: Mapping[str, Tensor]) -> dict[_Key, Tensor]:
    return {(what, name): tensor for name, tensor in tensors.items()}


def _taken(tensors: Mapping[_Key, Tensor], what: str) -> dict[str, Tensor]:
    return {name: tensor for (kind, name), tensor in tensors.items() if kind == what}


def _of_gradients(gradients: ShardGradients) -> dict[_Key, Tensor]:
    live_in, parameters = _named("live_in", gradients.live_in), _named("parameter", gradients.parameters)
    return live_in | parameters | _named("output", gradients.outputs)


def _gradients(found: Mapping[_Key, Tensor]) -> ShardGradients:
    return ShardGradients(
        live_in=_taken(found, "live_in"), parameters=_taken(found, "parameter"), outputs=_taken(found, "output")
    )
