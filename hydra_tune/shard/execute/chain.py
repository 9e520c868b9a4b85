"""A step of a trial as a chain of shard units over a store that keeps the values between units.

Training runs F0 .. F(K-2), then B(K-1), B(K-2) .. B0. The last shard has no forward unit, because its backward unit
includes the forward. A forward unit puts the values that cross cuts into the store. If the plan keeps the shard's
activations, the unit also stores the tensors saved by autograd, and the chain holds the graph for the backward unit.
Otherwise the backward unit computes its shard a second time, with gradients. To reproduce the same values, a training
forward unit first saves the generator's state if its shard draws, and the buffers that its shard uses and that this or a
later shard overwrites. The recompute starts from the saved buffers, and its own changes of buffers are thrown away, so
BatchNorm counts once. `BatchUnits` (`train/loop/batch_units.py`) makes a `ShardChain` for each batch that runs as units, and
`run_plan` (`shard/verify/step_outcome.py`) for each check of a plan.

Note: undo. The inputs of a unit stay unchanged until the unit has all its results (`ChainStore.settle`), except
buffers, of which there is a copy (`buffers_before`), and storages kept by a graph and freed during the backward. A unit
that fails earlier can therefore be run again (`train/loop/unit_rollback.py`), a backward unit by recomputing.

Note: kept, and yet recomputed. An autograd graph belongs to the device of its forward; on another GPU the graph's nodes
would refuse their operands. The scheduler is free to place the backward unit on another device, because binding the
unit would leave devices idle. Such a unit drops the graph and recomputes. All CPU devices are the same device to
autograd, so there the graph works everywhere. For this reason a forward unit that keeps its graph also saves the inputs
of a recompute.

A value's key in the store is its name. The modules of `train/` and `fusion/` find gradients by the keys made here. A chain
takes no lock: the unit that calls holds the gate and the unit's blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hydra_tune.devices.device import RandomGenerator
from hydra_tune.shard.capture.step_module import Objective, loss_itself
from hydra_tune.shard.execute import compute
from hydra_tune.shard.partition.plan import Shard, ShardPlan
from hydra_tune.shard.partition.subgraph import ShardGraph


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
    """Key of a buffer's value before the shard's forward unit."""
    return f"saved:{shard}:{name}"


def kept_key(shard: int, number: int) -> str:
    """Key of a storage saved by the graph of the shard's forward unit."""
    return f"kept:{shard}:{number}"


class ChainStore(Protocol):
    """Store of a chain's tensors; during a unit, all tensors are on the unit's device.

    A trial's store is a `BlockStore` (`train/state/block_store.py`); a check of a plan has a `HostChainStore`
    (`shard/verify/step_outcome.py`).
    """

    def state(self, names: Sequence[str]) -> list[Tensor]:
        """Return the trial's parameters (leaves) and buffers."""

    def constants(self, names: Sequence[str]) -> list[Tensor]:
        """Return the graph's constants."""

    def inputs(self, indices: Sequence[int]) -> list[Tensor]:
        """Return tensors of the batch."""

    def get(self, key: str) -> Tensor | None:
        """Return a value put earlier, or None."""

    def put(self, key: str, tensor: Tensor) -> None:
        """Keep a value, in place of an earlier value under the key."""

    def drop(self, key: str) -> None:
        """Forget a value; unknown keys are ignored."""

    def changed(self, key: str) -> None:
        """Note that the value under a key was changed in place."""

    def settle(self) -> None:
        """Note that a unit has put all results: from now on, its inputs may be overwritten and dropped."""


@dataclass(frozen=True, slots=True)
class _KeptTape:
    """Graph of a forward unit, device of the forward, and numbers of the storages saved by the graph."""

    tape: compute.ShardTape
    place: torch.device | None
    numbers: tuple[int, ...]


class ShardChain:
    """A single step of a single trial.

    Args:
        store: store of the values between units.
        objective: maps the loss to the root of the backward; by default the loss itself.
        recomputed: graphs of shards that keep no activations although the plan says so; may grow.
    """

    def __init__(
        self,
        plan: ShardPlan,
        store: ChainStore,
        objective: Objective = loss_itself,
        recomputed: list[ShardGraph] | None = None,
    ) -> None:
        self.plan = plan
        self._recomputed = [] if recomputed is None else recomputed
        self._objective = objective
        self._store = store
        self._random_states: dict[int, Tensor] = {}
        self._tapes: dict[int, _KeptTape] = {}
        self._before: dict[int, list[Tensor]] = {}

    def keys(self, kind: str, index: int) -> list[str]:
        """Keys of the values read by a unit, in any order; values never put are missing in the store."""
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
        """Keys of the storages kept by a shard's forward unit for its backward unit."""
        kept_tape = self._tapes.get(index)
        return [] if kept_tape is None else [kept_key(index, number) for number in kept_tape.numbers]

    def has_forward(self, index: int) -> bool:
        """Whether a shard has a separate forward unit."""
        return self.plan.mode != "train" or index < len(self.plan.shards) - 1

    def buffers_before(self, index: int) -> list[Tensor | None]:
        """Values of the buffers overwritten by a shard's unit, before the unit; None for buffers not yet saved."""
        if index in self._before:
            return list(self._before[index])
        return [self._store.get(saved_key(index, name)) for name in self.plan.shards[index].graph.written_state]

    def is_kept(self, index: int, place: torch.device) -> bool:
        """Whether a backward unit on this device would continue from the graph of its forward unit."""
        kept_tape = self._tapes.get(index)
        # A shard without operands has no device, so its graph may continue anywhere.
        return kept_tape is not None and kept_tape.place in (None, place)

    def let_go(self, index: int) -> None:
        """Drop a forward unit's graph and its saved storages, if any; the backward unit then recomputes."""
        # Before the tape goes, which has the numbers of the storages.
        keys = self.kept_keys(index)
        self._tapes.pop(index, None)
        for key in keys:
            self._store.drop(key)

    def keeps(self, index: int) -> bool:
        """Whether a shard's forward unit keeps its activations for the backward unit."""
        shard = self.plan.shards[index]
        # By graph and not by index: the list outlives the step, and other kinds of batches have other plans.
        return shard.keeps_activations and not any(graph is shard.graph for graph in self._recomputed)

    def recompute_from_now_on(self, index: int) -> None:
        """Stop keeping a shard's activations, after the activations have proved too large for the room."""
        if self.keeps(index):
            self._recomputed.append(self.plan.shards[index].graph)

    def close(self) -> None:
        """Drop all graphs."""
        for index in list(self._tapes):
            self.let_go(index)

    def forward(self, index: int, generator: RandomGenerator) -> None:
        """Run a forward unit; in evaluation, values are dropped after their last use."""
        shard = self.plan.shards[index]
        training = self.plan.mode == "train"
        if training:
            # Saved before the forward draws numbers, so that a recompute draws the same numbers.
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
        """Run a backward unit; the gradients of parameters go to `parameter_gradient_key`.

        Each complete gradient is added to the value under `earlier_gradient_key`, if there is one.
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
        # All results are in the store: a failure from here on no longer allows a second run.
        self._settle(index)
        for name in shard.trained:
            self.add_earlier(name)
        self._forget(shard, index)

    def _copy_buffers(self, index: int) -> None:
        """Copy buffers about to be overwritten, if no recompute needs a copy anyway, so that the unit can be undone."""
        names = self.plan.shards[index].graph.written_state
        if names:
            self._before[index] = [tensor.detach().clone() for tensor in self._store.state(names)]

    def _settle(self, index: int) -> None:
        self._before.pop(index, None)
        self._store.settle()

    def add_earlier(self, name: str) -> None:
        """Add this batch's gradient of a parameter to the sum of earlier batches, as autograd adds to `.grad`."""
        earlier = self._store.get(earlier_gradient_key(name))
        if earlier is None:
            return
        fresh = self._store.get(parameter_gradient_key(name))
        if fresh is not None:
            # In place and in the order of the batches, so that the sum has the bits of a plain loop's `.grad`.
            earlier.add_(fresh)
            self._store.changed(earlier_gradient_key(name))
        self._store.put(parameter_gradient_key(name), earlier)
        self._store.drop(earlier_gradient_key(name))

    def skip_backward(self, index: int) -> None:
        """Release the values of a shard without trained parameters and without gradient flow, instead of a backward."""
        self._forget(self.plan.shards[index], index)

    def _taped(self, index: int, shard: Shard) -> dict[str, Tensor]:
        """Run a forward unit that keeps its graph."""
        operands = self._operands(shard)
        outputs, tape = self.plan.computing.taped_forward(shard.graph, operands, shard.needs_gradient)
        place = next((tensor.device for tensor in operands.all), None)
        saved_storages = tape.settle()
        self._tapes[index] = _KeptTape(tape, place, tuple(saved_storages))
        for number, storage in saved_storages.items():
            self._store.put(kept_key(index, number), storage)
        return outputs

    def _played(self, index: int, shard: Shard) -> compute.ShardGradients:
        """Run a backward unit that continues from its forward unit's graph."""
        return self._tapes[index].tape.backward(
            shard.graph,
            self._operands(shard),
            self._incoming(shard),
            kept=lambda number: self._value(kept_key(index, number)),
            on_free=lambda number: self._store.drop(kept_key(index, number)),
        )

    def _computed(self, index: int, shard: Shard, generator: RandomGenerator) -> compute.ShardGradients:
        """Run a backward unit that first computes its shard."""
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

    def _incoming(self, shard: Shard) -> compute.IncomingGradients:
        parameters = (*shard.trained, *shard.shared_gradients)
        return compute.IncomingGradients(
            # A loss starts the backward, without a gradient from later shards; other values without one are left out.
            outputs={
                name: None if name in shard.losses else gradient
                for name in shard.gradient_outputs
                if (gradient := self._store.get(gradient_key(name))) is not None or name in shard.losses
            },
            live_in=self._present({name: gradient_key(name) for name in shard.graph.live_in}),
            parameters=self._present({name: parameter_gradient_key(name) for name in parameters}),
        )

    def _forget(self, shard: Shard, index: int) -> None:
        """Drop values not read by any later unit of the step."""
        self._random_states.pop(index, None)
        for name in shard.graph.live_in:
            # Backward units run from the last shard to the first, so the first user in forward order is the last reader.
            if self.plan.first_use[name] == index:
                self._store.drop(name)
        for name in shard.graph.live_out:
            self._store.drop(gradient_key(name))
        for name in shard.graph.saved_state:
            self._store.drop(saved_key(index, name))
        self.let_go(index)

    def _value(self, key: str) -> Tensor:
        tensor = self._store.get(key)
        assert tensor is not None, f"{key} was dropped too early"
        return tensor

    def _present(self, keys: dict[str, str]) -> dict[str, Tensor]:
        tensors = {name: self._store.get(key) for name, key in keys.items()}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def _operands(self, shard: Shard, saved: int | None = None) -> compute.ShardOperands:
        state = self._store.state(shard.graph.state)
        if saved is not None:
            for position, name in enumerate(shard.graph.state):
                if name in shard.graph.written_state:
                    # A copy of the saved buffer, because this unit may have to start from the saved buffer once more.
                    state[position] = self._value(saved_key(saved, name)).clone()
                # This unit only reads the buffer, which a later shard's forward has overwritten since.
                elif name in shard.graph.saved_state:
                    state[position] = self._value(saved_key(saved, name))
        live_in = [self._store.get(name) for name in shard.graph.live_in]
        missing = [name for name, t in zip(shard.graph.live_in, live_in, strict=True) if t is None]
        assert not missing, f"values {missing} were dropped too early"
        return compute.ShardOperands(
            state=state,
            constants=self._store.constants(shard.graph.constants),
            inputs=self._store.inputs(shard.graph.inputs),
            live_in=[tensor for tensor in live_in if tensor is not None],
        )
