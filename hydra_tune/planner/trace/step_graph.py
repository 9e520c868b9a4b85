"""A sub-array's step as a single flat graph: forward, backward and the update of each parameter.

Each parameter is updated once its gradient is there and no later operator needs the old value. When gradients are
clipped by their common norm, all updates follow the norm (`grad_clip_graph.py`), smallest parameters first: all
gradients are alive at that point, and each update holds a copy of its own gradient beside them.

The graph is traced on tensors without bytes (§3.2, step 3, and appendix B.1.2, B.1.3), so a step of any size can be
traced. Random numbers have nodes of their own, placed before the first use, in the order in which the step draws.
Differs: the paper has two graphs per sub-array. Here a single graph stores where forward and backward divide, and
`planner/passes/graph_rewrite.py` merges the halves of two graphs.

`StepPlanner` (`fusion/runtime/step_planner.py`) traces a group's step before the first plan of the step, and
`fusion/runtime/task_profiles.py` traces steps for `HydraExecutor.plan(profile=...)`. `planner/profile/` runs the graph,
`planner/passes/graph_rewrite.py` merges graphs, and `StepStateBinding` (`fusion/runtime/step_arguments.py`) finds the
tensors for the arguments. The module must not know memory limits or plans.

Note: gate. Tracing changes the state of the whole process, so callers of `step_graph` hold `GATE`
(`shard/capture/capture_lock.py`) alone.

Note: random numbers. Draws must keep their order, and a draw without users stays, or the members' generators would end
the step in other states than without a plan.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hydra_tune.batched.batched_random import HoistedDraw
from hydra_tune.batched.joint_graph import JointTrace, traced
from hydra_tune.errors import UnfusableError, first_line
from hydra_tune.planner.ir.aliasing import StorageAccessTable, seen
from hydra_tune.planner.ir.planner_ops import draw
from hydra_tune.planner.trace.grad_clip_graph import ClippingNodeEmitter, emitted
from hydra_tune.planner.trace.optimizer_graph import TracedUpdate, UpdateTracer
from hydra_tune.planner.trace.unsupported_ops import OperatorCallRecorder, check_devices, value_draws
from hydra_tune.shard.analysis.random_ops import draws_random_numbers
from hydra_tune.shard.execute.compute import ShardOperands

_LIMITS = "limits"


@dataclass(frozen=True, slots=True, kw_only=True)
class RateArgument:
    """Graph argument that carries a rate of the optimizer.

    Attributes:
        number: index of the rate within the group.
        dimensions: number of dimensions of the parameters that the rate multiplies.
    """

    group: int
    number: int
    dimensions: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """Computation of a sub-array in a step.

    Attributes:
        graph: returns the losses; overwrites parameters, buffers and optimizer state.
        owner: module that holds the graph's constants.
        num_forward: number of operators that belong to the forward.
        geometry: argument -> a tensor of the argument's geometry, without bytes.
        inputs: arguments that hold the batch, in order.
        state: parameter or buffer -> argument.
        constants: arguments that hold constants of the model, in order.
        moments: (parameter, name of an optimizer-state tensor) -> argument.
        rates: argument -> the rate that the argument carries.
        limits: argument with the norm to which each member's gradients are clipped, (members,) in float64, infinite for
            a member that does not clip; None when no member clips, and when nothing is updated.
        seen: storages that the nodes make, read and overwrite.
    """

    graph: fx.Graph
    owner: fx.GraphModule
    num_forward: int
    geometry: dict[str, Tensor]
    inputs: tuple[str, ...]
    state: dict[str, str]
    constants: tuple[str, ...]
    moments: dict[tuple[str, str], str]
    rates: dict[str, RateArgument]
    limits: str | None = None
    noise: tuple[HoistedDraw, ...]
    seen: StorageAccessTable

    @property
    def ops(self) -> list[fx.Node]:
        """Operators of the graph, in order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]


def step_graph(
    run: Any,
    names: Sequence[str],
    operands: ShardOperands,
    trains: Sequence[bool],
    count: int,
    tracer: UpdateTracer,
    groups: dict[str, int],
    place: torch.device | None = None,
    *,
    is_clipped: bool = False,
) -> StepGraph:
    """Trace the step of a sub-array.

    Args:
        run: the stacked model with its loss, as a single shard.
        names: names of the parameters and buffers.
        operands: tensors of the sizes to trace for; only the geometry counts.
        trains: for each name, whether a gradient is wanted.
        count: number of members.
        tracer: traces the members' updates.
        groups: parameter -> index of its parameter group, keys in the module's order.
        place: the device to trace for, wherever the operands lie now; None: the device of the operands.
        is_clipped: whether any member's gradients are clipped by their common norm.

    Raises:
        UnfusableError: the step has an operator that cannot be planned, or tensors on several devices; the message
            names the operator or the tensors.
    """
    if place is None:
        # With a `place`, the trace puts all operands on that device.
        check_devices(names, operands)
    try:
        joint = traced(run, names, operands, trains, "loss", count, place=place)
    except UnfusableError as error:
        raise UnfusableError(f"{error}; it runs unplanned") from error
    except Exception as error:
        # The error rarely names the operator. A second trace under `OperatorCallRecorder` fails in the same place, and
        # the last call is the culprit.
        calls = OperatorCallRecorder()
        with suppress(Exception), calls:
            traced(run, names, operands, trains, "loss", count, place=place)
        raise UnfusableError(
            f"its operator {calls.last} cannot be traced on tensors without bytes ({first_line(error)}); it runs unplanned"
        ) from error
    if joint is None:
        draws = ", ".join(value_draws(run, operands, place))
        raise UnfusableError(
            f"it draws random numbers other than those of dropout ({draws}), which no graph draws ahead; it runs unplanned"
        )
    return _StepGraphBuilder(joint, names, operands, tracer, groups, is_clipped=is_clipped).built()


class _StepGraphBuilder:
    """Builds a single graph from a traced forward and backward and the traced updates."""

    def __init__(
        self,
        joint: JointTrace,
        names: Sequence[str],
        operands: ShardOperands,
        tracer: UpdateTracer,
        groups: dict[str, int],
        *,
        is_clipped: bool,
    ) -> None:
        self._joint, self._names, self._groups, self._is_clipped = joint, names, groups, is_clipped
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
        self._rates: dict[str, RateArgument] = {}
        self._updates: dict[str, TracedUpdate] = {}
        self._clipped: ClippingNodeEmitter | None = None

    def built(self) -> StepGraph:
        arguments = [
            *(f"state_{place}" for place in range(len(self._names))),
            *(f"constant_{place}" for place in range(self._num_constants)),
            *(f"input_{place}" for place in range(self._num_inputs)),
        ]
        # Not strict: behind these, `_old` holds the noise, which becomes draw nodes instead of arguments.
        for traced_node, name, fake in zip(self._old, arguments, self._fakes, strict=False):
            self._new[traced_node] = self._argument(name, fake)
        # First all arguments: fx wants placeholders before other nodes.
        self._trace_updates()
        self._clipped = self._clipping()
        losses = self._emit()
        self._graph.output((self._new[losses],))
        self._graph.lint()
        ops = [node for node in self._graph.nodes if node.op == "call_function"]
        first_input = len(self._names) + self._num_constants
        return StepGraph(
            graph=self._graph,
            owner=self._joint.pure,
            num_forward=ops.index(self._new[losses]) + 1,
            geometry=self._geometry,
            inputs=tuple(arguments[first_input:]),
            state=dict(zip(self._names, arguments, strict=False)),
            constants=tuple(arguments[len(self._names) : first_input]),
            moments=self._moments,
            rates=self._rates,
            limits=None if self._clipped is None else _LIMITS,
            noise=self._joint.noise,
            seen=seen(self._graph, self._joint.pure, self._geometry, self._drawn(), self._mode),
        )

    def _argument(self, name: str, fake: Tensor) -> fx.Node:
        self._geometry[name] = fake
        node = self._graph.placeholder(name)
        node.meta["val"] = fake
        return node

    def _trace_updates(self) -> None:
        traced_updates: dict[tuple[Any, ...], TracedUpdate] = {}
        for name in self._joint.trained:
            if name not in self._groups:
                continue  # has a gradient, and no optimizer
            fake, group = self._fakes[list(self._names).index(name)], self._groups[name]
            # Parameters of equal geometry in the same group update alike, so a single trace serves all of them.
            key = (group, fake.shape, fake.stride(), fake.dtype)
            if key not in traced_updates:
                traced_updates[key] = self._tracer.traced(group, fake, self._mode, is_clipped=self._is_clipped)
            self._updates[name] = update = traced_updates[key]
            for moment in update.state:
                with self._mode:
                    like = torch.empty_like(fake)
                argument = f"moment_{len(self._moments)}"
                self._moments[name, moment] = argument
                self._argument(argument, like)
            for number in range(update.num_rates):
                rate = RateArgument(group=group, number=number, dimensions=fake.dim(), dtype=fake.dtype)
                # Parameters of the same group, dimension count and dtype share an argument: the rate broadcasts to
                # their shapes.
                if rate not in self._rates.values():
                    with self._mode:
                        like = torch.empty(
                            (fake.size(0), *[1] * (fake.dim() - 1)), dtype=fake.dtype, device=fake.device
                        )
                    argument = f"rate_{len(self._rates)}"
                    self._rates[argument] = rate
                    self._argument(argument, like)

    def _clipping(self) -> ClippingNodeEmitter | None:
        if not self._is_clipped or not self._updates:
            return None
        with self._mode:
            limits = torch.empty(self._count, dtype=torch.float64, device=self._fakes[0].device)
        return ClippingNodeEmitter(self._graph, self._argument(_LIMITS, limits), tuple(self._groups), self._mode)

    def _drawn(self) -> list[Tensor]:
        with self._mode:
            return [noise_draw.room(self._count, self._fakes[0].device) for noise_draw in self._joint.noise]

    def _noise(self) -> list[fx.Node]:
        return self._old[len(self._fakes) :]

    def _emit(self) -> fx.Node:
        """Copy the traced nodes, insert draws, norms and updates, and return the traced node of the losses."""
        body = [node for node in self._joint.pure.graph.nodes if node.op not in ("placeholder", "output")]
        place = {node: position for position, node in enumerate(body)}
        (output,) = (node for node in self._joint.pure.graph.nodes if node.op == "output")
        losses, *gradients = output.args[0]
        draws = self._draws_before(place, place[losses])
        facts = self._facts()
        gradient_nodes = dict(zip(self._joint.trained, gradients, strict=True))
        norms = self._norms_after(place, place[losses], gradient_nodes)
        updates = self._updates_after(body, place, gradient_nodes, facts)
        for position, node in enumerate(body):
            if node.op == "call_function" and draws_random_numbers(node):
                raise UnfusableError(f"{node.target} draws random numbers where none can be given; it runs unplanned")
            for number in draws.get(position, ()):
                self._new[self._noise()[number]] = self._graph.call_function(draw, (number,))
            self._new[node] = self._graph.node_copy(node, self._new.__getitem__)
            for name in norms.get(position, ()):
                assert self._clipped is not None, "norms are taken to clip"
                self._clipped.take(name, self._new[gradient_nodes[name]], facts.places[gradient_nodes[name].name])
            for name, gradient in updates.get(position, ()):
                self._emit_update(name, gradient)
        losses_node: fx.Node = losses
        return losses_node

    def _draws_before(self, place: dict[fx.Node, int], end: int) -> dict[int, list[int]]:
        """Position -> numbers of the draws emitted there: before the first use, and never after a later draw.

        The last draws come at `end` if nothing uses them.
        """
        numbers_by_position: dict[int, list[int]] = {}
        soonest = len(place)
        # Walk backwards, so that a draw used late still comes before all later draws: the generators have to move in
        # the order in which the step draws, or members get other numbers.
        for number in range(len(self._noise()) - 1, -1, -1):
            users = [place[user] for user in self._noise()[number].users if user in place]
            # A draw without users comes with the draw after the draw: the generators must move all the same.
            soonest = min([soonest, *(users or [end])])
            numbers_by_position.setdefault(soonest, []).insert(0, number)
        return numbers_by_position

    def _facts(self) -> StorageAccessTable:
        """Storages that the nodes of the traced forward and backward make, read and overwrite."""
        geometry = {node.name: fake for node, fake in zip(self._old, self._fakes, strict=False)}
        geometry |= {n.name: noise for n, noise in zip(self._noise(), self._drawn(), strict=True)}
        return seen(self._joint.pure.graph, self._joint.pure, geometry, [], self._mode)

    def _norms_after(
        self, place: dict[fx.Node, int], losses: int, gradients: dict[str, fx.Node]
    ) -> dict[int, list[str]]:
        """Position -> parameters whose gradient norms are taken there; empty without clipping.

        A norm follows its gradient, and lies in the backward even if the gradient exists before the losses.
        """
        names_by_position: dict[int, list[str]] = {}
        for name in self._updates if self._clipped is not None else ():
            names_by_position.setdefault(max(losses, place[gradients[name]]), []).append(name)
        return names_by_position

    def _updates_after(
        self, body: list[fx.Node], place: dict[fx.Node, int], gradients: dict[str, fx.Node], facts: StorageAccessTable
    ) -> dict[int, list[tuple[str, fx.Node]]]:
        """Position -> updates emitted there, as pairs of parameter and gradient.

        An update follows its gradient and the last read of the parameter. With clipping, all updates follow the last
        operator.
        """
        if self._clipped is not None:
            # An update copies its gradient. The large copies come last, when most gradients are already freed.
            smallest_first = sorted(self._updates, key=lambda name: self._fakes[list(self._names).index(name)].nbytes)
            return {len(body) - 1: [(name, gradients[name]) for name in smallest_first]}
        # The update overwrites the parameter in place, so it waits for all readers of the storage, views included.
        last_reads = {storage: place[node] for node in body for storage in facts.storages.get(node.name, ())}
        for node in body:
            for storage in facts.reads.get(node.name, ()):
                last_reads[storage] = max(last_reads.get(storage, 0), place[node])
        updates_by_position: dict[int, list[tuple[str, fx.Node]]] = {}
        for name in self._updates:
            parameter = self._old[list(self._names).index(name)]
            (storage,) = facts.storages[parameter.name]
            position = max(place[gradients[name]], last_reads.get(storage, 0))
            updates_by_position.setdefault(position, []).append((name, gradients[name]))
        return updates_by_position

    def _emit_update(self, name: str, gradient: fx.Node) -> None:
        update = self._updates[name]
        nodes = {node.name: node for node in self._graph.nodes if node.op == "placeholder"}
        fake = self._fakes[list(self._names).index(name)]
        rates = {
            (rate.number, rate.dimensions, rate.dtype): a
            for a, rate in self._rates.items()
            if rate.group == update.group
        }
        factors = () if self._clipped is None else (self._clipped.factors(fake.dtype),)
        arguments = [
            self._new[self._old[list(self._names).index(name)]],
            self._new[gradient],
            *factors,
            *(nodes[self._moments[name, moment]] for moment in update.state),
            *(nodes[rates[number, fake.dim(), fake.dtype]] for number in range(update.num_rates)),
        ]
        emitted(self._graph, update.module.graph, arguments)
