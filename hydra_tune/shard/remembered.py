"""What units make of tensors without bytes, run once and then remembered: steps of a rehearsal repeat.

What a graph makes depends on nothing but the geometry of what it is given: on sizes and strides, and on who lies on one storage
with whom. So a unit that is given what it was given before makes tensors of the same geometry, of which the same ones lie on
what it was given, on memory of their own, or together.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hydra_tune.memory.block import Geometry, storage_identity
from hydra_tune.shard import compute
from hydra_tune.shard.compute import Gradients, Incoming, Operands, Tape
from hydra_tune.shard.split import ShardGraph
from hydra_tune.shard.steps import Objective, loss_itself

_Key = tuple[str, str]
"""What a tensor is, and its name."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where something that was made lies: on which of the given tensors' storages, or else on which new one."""

    given: int | None
    new: int
    geometry: Geometry


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """What came of a run.

    Attributes:
        places: of the tensors, in their order.
        sizes: bytes of the new storages.
        freed: numbers of kept storages, in the order in which the run freed them.
    """

    places: dict[_Key, _Place]
    sizes: tuple[int, ...]
    freed: tuple[int, ...] = ()

    @staticmethod
    def of(given: Sequence[Tensor], found: Mapping[_Key, Tensor], freed: Sequence[int] = ()) -> "_Made":
        """What was found, as it lies."""
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
            places[key] = _Place(positions.get(storage), numbers.get(storage, 0), Geometry.of(tensor))
        return _Made(places=places, sizes=tuple(sizes), freed=tuple(freed))

    def again(self, given: Sequence[Tensor]) -> dict[_Key, Tensor]:
        """The same of other tensors that lie alike."""
        fresh = [torch.empty(size, dtype=torch.uint8) for size in self.sizes]
        found = {}
        for key, place in self.places.items():
            source = fresh[place.new] if place.given is None else given[place.given]
            found[key] = place.geometry.view(source.untyped_storage(), source.device)
        return found


class Remembered:
    """Runs shards of one plan whose tensors have no bytes, each in each situation once. Stands in for `shard/compute.py`."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Made] = {}

    def forward(
        self, shard: ShardGraph, operands: Operands, needs_gradient: frozenset[str] | None = None
    ) -> dict[str, Tensor]:
        """As `compute.forward`."""

        def run() -> dict[_Key, Tensor]:
            return _named("output", compute.forward(shard, operands, needs_gradient))

        key = ("forward", shard.first, shard.last, needs_gradient)
        return _taken(self._once(key, operands.all, run), "output")

    def taped_forward(
        self, shard: ShardGraph, operands: Operands, needs_gradient: frozenset[str]
    ) -> tuple[dict[str, Tensor], Tape]:
        """As `compute.taped_forward`; the graph has been settled."""

        def tape() -> Tape:
            made = compute.taped_forward(shard, operands, needs_gradient)[1]
            made.settle()
            return made

        def run() -> dict[_Key, Tensor]:
            outputs, made = compute.taped_forward(shard, operands, needs_gradient)
            kept = {str(number): flat for number, flat in made.settle().items()}
            return _named("output", outputs) | _named("kept", kept)

        key = ("taped", shard.first, shard.last, needs_gradient)
        found = self._once(key, operands.all, run)
        flats = {int(number): flat for number, flat in _taken(found, "kept").items()}
        return _taken(found, "output"), _RememberedTape(self, flats, tape)

    def backward(
        self,
        shard: ShardGraph,
        operands: Operands,
        *,
        needs_gradient: frozenset[str],
        incoming: Incoming,
        objective: Objective = loss_itself,
    ) -> Gradients:
        """As `compute.backward`."""

        def run() -> dict[_Key, Tensor]:
            gradients = compute.backward(
                shard, operands, needs_gradient=needs_gradient, incoming=incoming, objective=objective
            )
            return _of_gradients(gradients)

        key = ("backward", shard.first, shard.last, needs_gradient, _names(incoming))
        return _gradients(self._once(key, [*operands.all, *_handed(incoming)], run))

    def played(
        self,
        shard: ShardGraph,
        operands: Operands,
        incoming: Incoming,
        flats: Mapping[int, Tensor],
        on_free: Callable[[int], None],
        tape: Callable[[], Tape],
    ) -> Gradients:
        """The backward of a tape.

        Args:
            shard: whose tape it is.
            operands: as of `Tape.backward`.
            incoming: as of `Tape.backward`.
            flats: by number, what was kept.
            on_free: as of `Tape.backward`.
            tape: makes one that can be played.
        """
        given = [*operands.all, *_handed(incoming), *flats.values()]
        key = ("played", shard.first, shard.last, _names(incoming), tuple(flats), _likeness(given))
        made = self._known.get(key)
        if made is not None:
            for number in made.freed:
                on_free(number)
            return _gradients(made.again(given))
        freed: list[int] = []

        def free(number: int) -> None:
            freed.append(number)
            on_free(number)

        gradients = tape().backward(shard, operands, incoming, flats.__getitem__, free)
        self._known[key] = _Made.of(given, _of_gradients(gradients), freed)
        return gradients

    def _once(
        self, key: Hashable, given: Sequence[Tensor], run: Callable[[], dict[_Key, Tensor]]
    ) -> dict[_Key, Tensor]:
        key = (key, _likeness(given))
        made = self._known.get(key)
        if made is not None:
            return made.again(given)
        found = run()
        self._known[key] = _Made.of(given, found)
        return found


class _RememberedTape(Tape):
    """A graph that is made when nobody knows what it would give."""

    def __init__(self, remembered: Remembered, flats: dict[int, Tensor], tape: Callable[[], Tape]) -> None:
        self._remembered = remembered
        self._flats = flats
        self._numbers = tuple(flats)
        self._tape = tape

    def settle(self) -> dict[int, Tensor]:
        """As of `Tape`."""
        flats, self._flats = self._flats, {}
        return flats

    def backward(
        self,
        shard: ShardGraph,
        operands: Operands,
        incoming: Incoming,
        kept: Callable[[int], Tensor],
        on_free: Callable[[int], None],
    ) -> Gradients:
        """As of `Tape`."""
        flats = {number: kept(number) for number in self._numbers}
        return self._remembered.played(shard, operands, incoming, flats, on_free, self._tape)


def _likeness(given: Sequence[Tensor]) -> Hashable:
    """Equal for tensors that lie alike."""
    numbers: dict[int, int] = {}
    return tuple(
        (
            Geometry.of(tensor),
            tensor.requires_grad,
            tensor.untyped_storage().nbytes(),
            numbers.setdefault(storage_identity(tensor), len(numbers)),
        )
        for tensor in given
    )


def _handed(incoming: Incoming) -> list[Tensor]:
    """The gradients that later shards have handed over."""
    parts = (incoming.outputs, incoming.live_in, incoming.parameters)
    return [gradient for part in parts for gradient in part.values() if gradient is not None]


def _names(incoming: Incoming) -> Hashable:
    """Of what these gradients are."""
    outputs = tuple((name, gradient is None) for name, gradient in incoming.outputs.items())
    return outputs, tuple(incoming.live_in), tuple(incoming.parameters)


def _named(what: str, tensors: Mapping[str, Tensor]) -> dict[_Key, Tensor]:
    return {(what, name): tensor for name, tensor in tensors.items()}


def _taken(tensors: Mapping[_Key, Tensor], what: str) -> dict[str, Tensor]:
    return {name: tensor for (kind, name), tensor in tensors.items() if kind == what}


def _of_gradients(gradients: Gradients) -> dict[_Key, Tensor]:
    live_in, parameters = _named("live_in", gradients.live_in), _named("parameter", gradients.parameters)
    return live_in | parameters | _named("output", gradients.outputs)


def _gradients(found: Mapping[_Key, Tensor]) -> Gradients:
    return Gradients(
        live_in=_taken(found, "live_in"), parameters=_taken(found, "parameter"), outputs=_taken(found, "output")
    )
