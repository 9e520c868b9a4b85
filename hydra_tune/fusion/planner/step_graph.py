"""A sub-array's step as one flat graph: forward, backward, and each parameter's update as soon as nothing needs it any more.

The graph is traced on tensors without bytes (§3.2, step 3, and appendix B.1.2, B.1.3), so it may be of any size.
Random numbers are drawn by nodes of their own, just before they are used, in the order in which the step draws them.
Differs: the paper has two graphs per sub-array; here they are one, with the place where it divides, and `rewrite.py`
puts the halves of two together.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.drawing import Noise, noting
from hydra_tune.fusion.planner.nodes import draw
from hydra_tune.fusion.planner.storages import Seen, seen
from hydra_tune.fusion.planner.updates import TracedUpdate, UpdateTracer
from hydra_tune.fusion.tracing import Traced, traced
from hydra_tune.shard.compute import Operands
from hydra_tune.shard.stochastic import draws_random_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """An argument of a graph: a rate of the optimizer.

    Attributes:
        group: the parameter group.
        number: which of the group's rates.
        dimensions: of the parameters that it multiplies.
        dtype: of it.
    """

    group: int
    number: int
    dimensions: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """What a sub-array computes in a step.

    Attributes:
        graph: returns the losses; overwrites parameters, buffers and optimizer state.
        owner: the module of its constants.
        num_forward: how many of its operators are of the forward.
        geometry: argument -> a tensor of its geometry, without bytes.
        inputs: arguments that are the batch, in order.
        state: parameter or buffer -> argument.
        constants: arguments that are constants of the model, in order.
        moments: parameter, name of a tensor of its optimizer state -> argument.
        rates: argument -> what it is.
        noise: what it draws.
        seen: what its nodes make, read and overwrite.
    """

    graph: fx.Graph
    owner: fx.GraphModule
    num_forward: int
    geometry: dict[str, Tensor]
    inputs: tuple[str, ...]
    state: dict[str, str]
    constants: tuple[str, ...]
    moments: dict[tuple[str, str], str]
    rates: dict[str, Rate]
    noise: tuple[Noise, ...]
    seen: Seen

    @property
    def ops(self) -> list[fx.Node]:
        """Its operators in order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]


def step_graph(
    run: Any,
    names: Sequence[str],
    operands: Operands,
    trains: Sequence[bool],
    count: int,
    tracer: UpdateTracer,
    groups: dict[str, int],
    place: torch.device | None = None,
) -> StepGraph:
    """Trace the step of a sub-array.

    Args:
        run: the stacked model with its loss: a shard that is all of the model.
        names: of its parameters and buffers.
        operands: tensors of the sizes to trace for; only their geometry counts.
        trains: for each of the names, whether its gradient is wanted.
        count: members.
        tracer: of their updates.
        groups: parameter -> its parameter group.
        place: the device to trace for, wherever the operands are now; None: theirs.

    Raises:
        UnfusableError: the step has an operator that cannot be planned, or tensors on several devices; the message
            names it.
    """
    if place is None:
        _check_devices(names, operands)
    try:
        joint = traced(run, names, operands, trains, "loss", count, place=place)
    except Exception as error:
        calls = _Calls()
        with suppress(Exception), calls:
            traced(run, names, operands, trains, "loss", count, place=place)
        raise UnfusableError(
            f"its operator {calls.last} cannot be traced on tensors without bytes ({_told(error)}); it runs unplanned"
        ) from error
    if joint is None:
        raise UnfusableError(
            f"it draws random numbers that depend on values ({', '.join(_value_draws(run, operands))}), which no graph can "
            "draw ahead; it runs unplanned"
        )
    return _Builder(joint, names, operands, tracer, groups).built()


def _value_draws(run: Any, operands: Operands) -> list[str]:
    """The operators whose random numbers depend on values."""
    mode, calls = FakeTensorMode(), _Calls()
    fakes = [mode.from_tensor(tensor.detach()) for tensor in operands.all]
    with mode, torch.no_grad(), noting() as noted, calls:
        run(*fakes)
    return sorted(calls.random | set(noted.refused))


def _told(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operators are called, where something is wrong with one of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.last = "(none)"
        self.random: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.last = str(func)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random.add(self.last)
        return func(*args, **(kwargs or {}))


def _check_devices(names: Sequence[str], operands: Operands) -> None:
    kinds = {"constant": operands.constants, "tensor of the batch": operands.inputs}
    each = [*zip(names, operands.state, strict=True)]
    each += [(f"{kind} {place}", one) for kind, tensors in kinds.items() for place, one in enumerate(tensors)]
    found: dict[str, str] = {}
    for name, tensor in each:
        found.setdefault(str(tensor.device), name)
    if len(found) > 1:
        told_of = ", ".join(f"{name} on {device}" for device, name in sorted(found.items()))
        raise UnfusableError(f"its tensors are on several devices ({told_of}), and a plan is of one; it runs unplanned")


class _Builder:
    """Makes one graph of a traced forward and backward, and the updates."""

    def __init__(
        self,
        joint: Traced,
        names: Sequence[str],
        operands: Operands,
        tracer: UpdateTracer,
        groups: dict[str, int],
    ) -> None:
        self._joint, self._names, self._groups = joint, names, groups
        self._mode = FakeTensorMode()
        self._tracer, self._count = tracer, tracer.count
        self._old = [node for node in joint.pure.graph.nodes if node.op == "placeholder"]
        self._num_constants, self._num_inputs = len(operands.constants), len(operands.inputs)
        with self._mode:
            self._fakes = [
                torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=joint.place)
                for tensor in operands.all
            ]
        self._graph = fx.Graph(joint.pure)
        self._new: dict[fx.Node, fx.Node] = {}
        self._geometry: dict[str, Tensor] = {}
        self._moments: dict[tuple[str, str], str] = {}
        self._rates: dict[str, Rate] = {}
        self._updates: dict[str, TracedUpdate] = {}

    def built(self) -> StepGraph:
        """The graph."""
        arguments = [
            *(f"state_{place}" for place in range(len(self._names))),
            *(f"constant_{place}" for place in range(self._num_constants)),
            *(f"input_{place}" for place in range(self._num_inputs)),
        ]
        for old, name, fake in zip(self._old, arguments, self._fakes, strict=False):
            self._new[old] = self._argument(name, fake)
        self._trace_updates()
        losses = self._emit()
        self._graph.output((self._new[losses],))
        self._graph.lint()
        ops = [node for node in self._graph.nodes if node.op == "call_function"]
        first = len(self._names) + self._num_constants
        return StepGraph(
            graph=self._graph,
            owner=self._joint.pure,
            num_forward=ops.index(self._new[losses]) + 1,
            geometry=self._geometry,
            inputs=tuple(arguments[first:]),
            state=dict(zip(self._names, arguments, strict=False)),
            constants=tuple(arguments[len(self._names) : first]),
            moments=self._moments,
            rates=self._rates,
            noise=self._joint.noise,
            seen=seen(self._graph, self._joint.pure, self._geometry, self._drawn(), self._mode),
        )

    def _argument(self, name: str, fake: Tensor) -> fx.Node:
        self._geometry[name] = fake
        node = self._graph.placeholder(name)
        node.meta["val"] = fake
        return node

    def _trace_updates(self) -> None:
        known: dict[tuple[Any, ...], TracedUpdate] = {}
        for name in self._joint.trained:
            if name not in self._groups:
                continue  # has a gradient, and no optimizer
            fake, group = self._fakes[list(self._names).index(name)], self._groups[name]
            key = (group, fake.shape, fake.stride(), fake.dtype)
            if key not in known:
                known[key] = self._tracer.traced(group, fake, self._mode)
            self._updates[name] = update = known[key]
            for moment in update.state:
                with self._mode:
                    like = torch.empty_like(fake)
                argument = f"moment_{len(self._moments)}"
                self._moments[name, moment] = argument
                self._argument(argument, like)
            for number in range(update.num_rates):
                rate = Rate(group=group, number=number, dimensions=fake.dim(), dtype=fake.dtype)
                if rate not in self._rates.values():
                    with self._mode:
                        like = torch.empty(
                            (fake.size(0), *[1] * (fake.dim() - 1)), dtype=fake.dtype, device=fake.device
                        )
                    argument = f"rate_{len(self._rates)}"
                    self._rates[argument] = rate
                    self._argument(argument, like)

    def _drawn(self) -> list[Tensor]:
        with self._mode:
            return [one.room(self._count, self._fakes[0].device) for one in self._joint.noise]

    def _noise(self) -> list[fx.Node]:
        return self._old[len(self._fakes) :]

    def _emit(self) -> fx.Node:
        """Copy the traced nodes, with draws before their uses and updates after their parameters' last uses; the losses."""
        body = [node for node in self._joint.pure.graph.nodes if node.op not in ("placeholder", "output")]
        place = {node: position for position, node in enumerate(body)}
        (output,) = (node for node in self._joint.pure.graph.nodes if node.op == "output")
        losses, *gradients = output.args[0]
        draws = self._draws_before(place)
        updates = self._updates_after(body, place, dict(zip(self._joint.trained, gradients, strict=True)))
        for position, node in enumerate(body):
            if node.op == "call_function" and draws_random_numbers(node):
                raise UnfusableError(f"{node.target} draws random numbers where none can be given; it runs unplanned")
            for number in draws.get(position, ()):
                self._new[self._noise()[number]] = self._graph.call_function(draw, (number,))
            self._new[node] = self._graph.node_copy(node, self._new.__getitem__)
            for name, gradient in updates.get(position, ()):
                self._emit_update(name, gradient)
        found: fx.Node = losses
        return found

    def _draws_before(self, place: dict[fx.Node, int]) -> dict[int, list[int]]:
        """Where each noise is drawn: before its first use, and no earlier noise later."""
        found: dict[int, list[int]] = {}
        soonest = len(place)
        for number in range(len(self._noise()) - 1, -1, -1):
            users = [place[user] for user in self._noise()[number].users if user in place]
            soonest = min([soonest, *users])
            found.setdefault(soonest, []).insert(0, number)
        return found

    def _updates_after(
        self, body: list[fx.Node], place: dict[fx.Node, int], gradients: dict[str, fx.Node]
    ) -> dict[int, list[tuple[str, fx.Node]]]:
        """Where each parameter is updated: when its gradient is there and nothing reads the parameter any more."""
        geometry = {node.name: fake for node, fake in zip(self._old, self._fakes, strict=False)}
        geometry |= {n.name: drawn for n, drawn in zip(self._noise(), self._drawn(), strict=True)}
        facts = seen(self._joint.pure.graph, self._joint.pure, geometry, [], self._mode)
        last = {storage: place[node] for node in body for storage in facts.storages.get(node.name, ())}
        for node in body:
            for storage in facts.reads.get(node.name, ()):
                last[storage] = max(last.get(storage, 0), place[node])
        found: dict[int, list[tuple[str, fx.Node]]] = {}
        for name in self._updates:
            parameter = self._old[list(self._names).index(name)]
            (storage,) = facts.storages[parameter.name]
            position = max(place[gradients[name]], last.get(storage, 0))
            found.setdefault(position, []).append((name, gradients[name]))
        return found

    def _emit_update(self, name: str, gradient: fx.Node) -> None:
        update = self._updates[name]
        nodes = {node.name: node for node in self._graph.nodes if node.op == "placeholder"}
        fake = self._fakes[list(self._names).index(name)]
        rates = {
            (rate.number, rate.dimensions, rate.dtype): a
            for a, rate in self._rates.items()
            if rate.group == update.group
        }
        given = iter(
            [
                self._new[self._old[list(self._names).index(name)]],
                self._new[gradient],
                *(nodes[self._moments[name, moment]] for moment in update.state),
                *(nodes[rates[number, fake.dim(), fake.dtype]] for number in range(update.num_rates)),
            ]
        )
        new: dict[fx.Node, fx.Node] = {}
        for node in update.module.graph.nodes:
            if node.op == "placeholder":
                new[node] = next(given)
            elif node.op == "call_function":
                new[node] = self._graph.node_copy(node, new.__getitem__)
