"""One step of one trial as a chain of shard units, over a store that keeps the values between units.

Training runs F0 .. F(K-2), then B(K-1), B(K-2) .. B0. The last shard has no forward unit: its backward unit is its forward.
A forward unit puts what crosses cuts into the store and, where the plan says that the shard's activations are kept, what
autograd has saved as well; its graph waits here for the backward unit. Otherwise the backward unit computes its shard a second
time, with gradients. For that to give the same values, a forward unit first saves the generator's state and the buffers it is
about to overwrite; the recompute starts from these and what it overwrites is thrown away, so BatchNorm counts once.

Note: what a unit is given stays as it is until the unit has all its results (`Store.settle`), but for what a graph has kept and
its backward frees in passing. So a unit that fails before can be run again (`train/undo.py`), a backward unit by recomputing.

Note: kept, and yet recomputed. An autograd graph belongs to the device it was made on: on another GPU its nodes would refuse
their operands. The scheduler is free to place the backward unit there, because binding it would leave devices idle, so such a
unit gives the graph up and recomputes. All CPU devices are one device to autograd, and there the graph serves anywhere. For
this a forward unit that keeps also saves what a recompute needs.

Keys of the store are `value`, `gradient of a value`, `gradient of a parameter`, `saved buffer` and `kept storage`; see the
functions below.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hydra_tune.devices.device import RandomGenerator
from hydra_tune.shard import compute
from hydra_tune.shard.plan import Plan, Shard
from hydra_tune.shard.split import ShardGraph
from hydra_tune.shard.steps import Objective, loss_itself


def gradient_key(name: str) -> str:
    """Key of the accumulated gradient of a value."""
    return f"gradient:{name}"


def parameter_gradient_key(name: str) -> str:
    """Key of the accumulated gradient of a parameter."""
    return f"parameter_gradient:{name}"


def earlier_gradient_key(name: str) -> str:
    """Key of a parameter's gradient from earlier batches of the same step."""
    return f"earlier_gradient:{name}"


def saved_key(shard: int, name: str) -> str:
    """Key of a buffer as it was before the shard's forward unit."""
    return f"saved:{shard}:{name}"


def kept_key(shard: int, number: int) -> str:
    """Key of a storage that the graph of the shard's forward unit has saved."""
    return f"kept:{shard}:{number}"


class Store(Protocol):
    """Where a chain's tensors are; everything is on the unit's device while the unit runs."""

    def state(self, names: Sequence[str]) -> list[Tensor]:
        """The trial's parameters (leaves) and buffers."""

    def constants(self, names: Sequence[str]) -> list[Tensor]:
        """The graph's constants."""

    def inputs(self, indices: Sequence[int]) -> list[Tensor]:
        """Tensors of the batch."""

    def get(self, key: str) -> Tensor | None:
        """A value put earlier, or None."""

    def put(self, key: str, tensor: Tensor) -> None:
        """Keep a value, in place of the one under that key."""

    def drop(self, key: str) -> None:
        """Forget a value; unknown keys are ignored."""

    def changed(self, key: str) -> None:
        """The value under a key was changed in place."""

    def settle(self) -> None:
        """A unit has put its results: from here on what it was given is overwritten and dropped."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """The graph of a forward unit, where it was made, and the numbers of what it has saved."""

    tape: compute.Tape
    place: torch.device | None
    numbers: tuple[int, ...]


class Chain:
    """One step of one trial.

    Args:
        plan: the step cut into shards.
        store: where values are between units.
        objective: what the backward starts from; the loss itself unless given.
        recomputed: graphs of shards that keep no activations although their plan says so; may grow.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        objective: Objective = loss_itself,
        recomputed: list[ShardGraph] | None = None,
    ) -> None:
        self.plan = plan
        self._recomputed = [] if recomputed is None else recomputed
        self._objective = objective
        self._store = store
        self._random_states: dict[int, Tensor] = {}
        self._tapes: dict[int, _Kept] = {}
        self._before: dict[int, list[Tensor]] = {}

    def keys(self, kind: str, index: int) -> list[str]:
        """Keys of the values a unit reads, in any order; those never put are simply not there."""
        shard = self.plan.shards[index]
        keys = list(shard.graph.live_in)
        if kind == "backward":
            keys += [gradient_key(name) for name in (*shard.gradient_outputs, *shard.graph.live_in)]
            keys += [parameter_gradient_key(name) for name in (*shard.trained, *shard.shared_gradients)]
            keys += [earlier_gradient_key(name) for name in shard.trained]
            keys += [saved_key(index, name) for name in shard.graph.saved_state]
            keys += self.kept_keys(index)
        return keys

    def kept_keys(self, index: int) -> list[str]:
        """Keys of what a shard's forward unit has kept for its backward unit."""
        kept = self._tapes.get(index)
        return [] if kept is None else [kept_key(index, number) for number in kept.numbers]

    def has_forward(self, index: int) -> bool:
        """Whether a shard has a forward unit of its own."""
        return self.plan.mode != "train" or index < len(self.plan.shards) - 1

    def buffers_before(self, index: int) -> list[Tensor | None]:
        """The buffers that a shard's unit overwrites as they were before it; None for those it has not come to yet."""
        if index in self._before:
            return list(self._before[index])
        return [self._store.get(saved_key(index, name)) for name in self.plan.shards[index].graph.written_state]

    def is_kept(self, index: int, place: torch.device) -> bool:
        """Whether a backward unit on this device would go on from the graph of its forward unit."""
        kept = self._tapes.get(index)
        return kept is not None and kept.place in (None, place)

    def let_go(self, index: int) -> None:
        """Give up a forward unit's graph and what it has saved, if there is one: its backward unit recomputes."""
        keys = self.kept_keys(index)
        self._tapes.pop(index, None)
        for key in keys:
            self._store.drop(key)

    def keeps(self, index: int) -> bool:
        """Whether a shard's forward unit keeps its activations for the backward unit."""
        shard = self.plan.shards[index]
        return shard.keeps_activations and not any(graph is shard.graph for graph in self._recomputed)

    def recompute_from_now_on(self, index: int) -> None:
        """A shard's activations have turned out to take more than there is: do not keep them any more."""
        if self.keeps(index):
            self._recomputed.append(self.plan.shards[index].graph)

    def close(self) -> None:
        """Give up all graphs."""
        for index in list(self._tapes):
            self.let_go(index)

    def forward(self, index: int, generator: RandomGenerator) -> None:
        """Run a forward unit; in evaluation values go after their last use."""
        shard = self.plan.shards[index]
        training = self.plan.mode == "train"
        if training:
            if shard.graph.stochastic:
                self._random_states[index] = generator.get_state()
            for name, tensor in zip(shard.graph.saved_state, self._store.state(shard.graph.saved_state), strict=True):
                self._store.put(saved_key(index, name), tensor.detach().clone())
        else:
            self._copy_buffers(index)
        if training and self.keeps(index):
            outputs = self._taped(index, shard)
        else:
            outputs = self.plan.computing.forward(
                shard.graph, self._operands(shard), shard.needs_gradient if training else None
            )
        for name, tensor in outputs.items():
            self._store.put(name, tensor)
        self._settle(index)
        if not training:
            for name in shard.graph.live_in:
                if self.plan.last_use[name] == index:
                    self._store.drop(name)

    def backward(self, index: int, generator: RandomGenerator) -> None:
        """Run a backward unit; leaves gradients of parameters under `parameter_gradient_key`.

        To those that are complete, what is under `earlier_gradient_key` is added.
        """
        shard = self.plan.shards[index]
        if not self.has_forward(index):
            self._copy_buffers(index)
        gradients = self._played(index, shard) if index in self._tapes else self._computed(index, shard, generator)
        for name, gradient in gradients.live_in.items():
            self._store.put(gradient_key(name), gradient)
        for name, gradient in gradients.parameters.items():
            self._store.put(parameter_gradient_key(name), gradient)
        for name, tensor in gradients.outputs.items():
            self._store.put(name, tensor)
        self._settle(index)
        for name in shard.trained:
            self.add_earlier(name)
        self._forget(shard, index)

    def _copy_buffers(self, index: int) -> None:
        """Buffers that are overwritten and that no recompute needs, for as long as the unit may have to be undone."""
        names = self.plan.shards[index].graph.written_state
        if names:
            self._before[index] = [tensor.detach().clone() for tensor in self._store.state(names)]

    def _settle(self, index: int) -> None:
        self._before.pop(index, None)
        self._store.settle()

    def add_earlier(self, name: str) -> None:
        """To what earlier batches have given a parameter, add what this one has, as autograd would add to `.grad`."""
        earlier = self._store.get(earlier_gradient_key(name))
        if earlier is None:
            return
        fresh = self._store.get(parameter_gradient_key(name))
        if fresh is not None:
            earlier.add_(fresh)
            self._store.changed(earlier_gradient_key(name))
        self._store.put(parameter_gradient_key(name), earlier)
        self._store.drop(earlier_gradient_key(name))

    def skip_backward(self, index: int) -> None:
        """Nothing of a shard is trained and no gradient flows through it: its backward only lets values go."""
        self._forget(self.plan.shards[index], index)

    def _taped(self, index: int, shard: Shard) -> dict[str, Tensor]:
        """A forward unit that keeps its graph."""
        operands = self._operands(shard)
        outputs, tape = self.plan.computing.taped_forward(shard.graph, operands, shard.needs_gradient)
        place = next((tensor.device for tensor in operands.all), None)
        saved = tape.settle()
        self._tapes[index] = _Kept(tape, place, tuple(saved))
        for number, storage in saved.items():
            self._store.put(kept_key(index, number), storage)
        return outputs

    def _played(self, index: int, shard: Shard) -> compute.Gradients:
        """A backward unit that goes on from its forward unit's graph."""
        return self._tapes[index].tape.backward(
            shard.graph,
            self._operands(shard),
            self._incoming(shard),
            kept=lambda number: self._value(kept_key(index, number)),
            on_free=lambda number: self._store.drop(kept_key(index, number)),
        )

    def _computed(self, index: int, shard: Shard, generator: RandomGenerator) -> compute.Gradients:
        """A backward unit that computes its shard first."""
        recompute = self.has_forward(index)
        if recompute and shard.graph.stochastic:
            generator.set_state(self._random_states[index])
        return self.plan.computing.backward(
            shard.graph,
            self._operands(shard, saved=index if recompute else None),
            needs_gradient=shard.needs_gradient,
            incoming=self._incoming(shard),
            objective=self._objective,
        )

    def _incoming(self, shard: Shard) -> compute.Incoming:
        parameters = (*shard.trained, *shard.shared_gradients)
        return compute.Incoming(
            outputs={
                name: None if name in shard.losses else gradient
                for name in shard.gradient_outputs
                if (gradient := self._store.get(gradient_key(name))) is not None or name in shard.losses
            },
            live_in=self._present({name: gradient_key(name) for name in shard.graph.live_in}),
            parameters=self._present({name: parameter_gradient_key(name) for name in parameters}),
        )

    def _forget(self, shard: Shard, index: int) -> None:
        """Drop what no later unit of the step reads."""
        self._random_states.pop(index, None)
        for name in shard.graph.live_in:
            if self.plan.first_use[name] == index:
                self._store.drop(name)
        for name in shard.graph.live_out:
            self._store.drop(gradient_key(name))
        for name in shard.graph.saved_state:
            self._store.drop(saved_key(index, name))
        self.let_go(index)

    def _value(self, key: str) -> Tensor:
        found = self._store.get(key)
        assert found is not None, f"{key} was dropped too early"
        return found

    def _present(self, keys: dict[str, str]) -> dict[str, Tensor]:
        found = {name: self._store.get(key) for name, key in keys.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _operands(self, shard: Shard, saved: int | None = None) -> compute.Operands:
        state = self._store.state(shard.graph.state)
        if saved is not None:
            for position, name in enumerate(shard.graph.state):
                if name in shard.graph.written_state:
                    # A copy of what was saved: this unit may have to start from it once more.
                    state[position] = self._value(saved_key(saved, name)).clone()
                elif name in shard.graph.saved_state:
                    state[position] = self._value(saved_key(saved, name))
        live_in = [self._store.get(name) for name in shard.graph.live_in]
        missing = [name for name, t in zip(shard.graph.live_in, live_in, strict=True) if t is None]
        assert not missing, f"values {missing} were dropped too early"
        return compute.Operands(
            state=state,
            constants=self._store.constants(shard.graph.constants),
            inputs=self._store.inputs(shard.graph.inputs),
            live_in=[tensor for tensor in live_in if tensor is not None],
        )
