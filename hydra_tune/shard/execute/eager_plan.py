"""The whole-model path: plans of a single shard, for a step that cannot be captured, and for a trial's own code.

Parameters and buffers still live in blocks and are spilled between units. If the activations do not fit beside the
parameters and buffers, the unit spills the activations from forward to backward (`memory/activation_offload.py`).
`PlanLibrary` (`shard/partition/plan_cache.py`) calls `whole_plan` for a step without a graph, whose units then run the
user's code eagerly in an `EagerStep`. `SingleTrial` (`train/single_trial.py`), `train/own_code_trial.py` and a forecast
(`pool/dry_run/report.py`) ask `uncaptured` whether the user's own code may run unchanged;
`train/own_loop/loop_trial.py` asks `state_plan` for the bytes of such a trial. `train/loop/batch_units.py` and rehearsals
(`train/timing/fake_trial.py`) know a step of this path by its `EagerStep`. `PlanLibrary` holds the gate alone while
`whole_plan` measures; `uncaptured` and `state_plan` must run none of the user's code.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hydra_tune.errors import BudgetError, CaptureError, MetricError, TaskError
from hydra_tune.quantities import format_bytes, format_bytes_up
from hydra_tune.shard.capture import batch as batches
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.capture.precision import eager_autocast
from hydra_tune.shard.capture.step_capture import StateSpec, state_specs
from hydra_tune.shard.capture.step_module import step_module
from hydra_tune.shard.cost.eager_pilot import EagerCost, EagerPilot
from hydra_tune.shard.cost.pilot import ShardCost, UpdatePilot, aligned
from hydra_tune.shard.cost.update_pilot import optimizer_pilot
from hydra_tune.shard.partition.budget import ShardPlanConstraints
from hydra_tune.shard.partition.gradient_rules import GradientRules
from hydra_tune.shard.partition.plan import Shard, ShardPlan
from hydra_tune.shard.partition.subgraph import ShardGraph
from hydra_tune.task import Precision, TrainTask

# Share of a device for parameters and gradients, below which a first step with its activations on the host is likely to
# fit.
_MOST_HELD = 0.75
_MOST_STATE = 0.95  # the same, with optimizer state included
_GUESSED_STATES = 2  # guess for a user's own optimizer: state tensors of a parameter's size


class EagerStep:
    """Takes the place of a shard's graph, and runs the user's own code on the trial's own module.

    The state among the arguments is ignored: the module's parameters are the same objects, wherever their bytes are.

    Args:
        num_state: number of tensors of the state, which come first among the arguments.
        names: names of the results, as of the first batch.
        trained: names of the parameters that the plan updates.
    """

    def __init__(
        self,
        task: TrainTask,
        model: nn.Module,
        mode: str,
        leaves: batches.BatchLeaves,
        num_state: int,
        names: tuple[str, ...],
        trained: tuple[str, ...],
    ) -> None:
        self._call, self._names = (task, model, mode), names
        self._trained = frozenset(trained)
        # The plan outlives the batch, so the step keeps the structure of the batch and no tensor.
        self._rebuild = leaves.without_tensors().rebuild
        self._num_state = num_state

    @property
    def precision(self) -> Precision:
        """Precision of the task."""
        return self._call[0].precision

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Return the step's results for the batch tensors among the arguments.

        Raises:
            MetricError: the results have other names than those of the first batch.
            TaskError: the step has thawed a parameter, which the plan does not update.
        """
        parameters = dict(self._call[1].named_parameters()) if self._call[2] == "train" else {}
        left_out = [name for name, p in parameters.items() if not p.requires_grad and name not in self._trained]
        device_type = arguments[0].device.type if arguments else "cpu"
        with eager_autocast(self._call[0].precision, device_type):
            # The trial sets the mode, once a pass: a step may leave modules in another mode for the next step.
            step = step_module(*self._call, sets_mode=False)
            results = step(self._rebuild(arguments[self._num_state :]))
        if thawed := [name for name in left_out if parameters[name].requires_grad]:
            raise TaskError(
                f"the step sets requires_grad of {thawed[0]!r}, which a model that does not fit as it is updates from the next "
                "step on; call requires_grad_() between steps, as in scheduler= of the task"
            )
        if results.keys() != set(self._names):
            raise MetricError(
                f"evaluate= returned {', '.join(sorted(results))} for a batch, and {', '.join(sorted(self._names))} for the "
                "first, which a model that does not fit as it is cannot follow; return the same names for every batch"
            )
        return tuple(results[name] for name in self._names)


def whole_plan(
    task: TrainTask,
    model: nn.Module,
    twin: nn.Module,
    leaves: batches.BatchLeaves,
    mode: str,
    *,
    specs: dict[str, StateSpec],
    update: UpdatePilot | None,
    budget_bytes: int,
    alignment: int,
    updates_on_host: bool = False,
    reason: CaptureError,
) -> ShardPlan:
    """Make a plan with a single eager shard.

    `model` is the trial's module, which the plan will run; `twin`, a copy for measuring, is left in an undefined state.
    `reason` is the reason for the failed capture, and `budget_bytes` the memory of the smallest device.

    Raises:
        BudgetError: the model does not fit whole.
    """
    training = mode == "train"
    trained = tuple(name for name, spec in specs.items() if spec.requires_grad) if training else ()
    rules = GradientRules.of(task)

    def cost_of(eager: EagerCost) -> ShardCost:
        cost = _cost(specs, trained, leaves, eager, update, rules, alignment=alignment, training=training)
        return replace(cost, updates_on_host=updates_on_host)

    pilot = EagerPilot(task, model, leaves, mode, alignment)
    eager = pilot.keeping(twin)
    names, cost = eager.names, cost_of(eager)
    if cost.peak_bytes > budget_bytes:
        cost = _spilled(pilot, cost, cost_of, budget_bytes, reason)
    shard = Shard(
        graph=_graph(EagerStep(task, model, mode, leaves, len(specs), names, trained), tuple(specs), leaves, names),
        cost=cost,
        needs_gradient=frozenset(),
        gradient_outputs=names if training else (),
        losses=names,
        trained=trained,
        shared_gradients=(),
        has_backward=training,
    )
    return ShardPlan(
        mode=mode,
        shards=(shard,),
        names=names,
        outputs=names,
        constants={},
        birth=dict.fromkeys(names, 0),
        first_use={},
        last_use={},
        eager=True,
        why_eager=next(iter(str(reason).splitlines()), ""),
    )


def uncaptured(
    task: TrainTask, model: nn.Module, optimizer: torch.optim.Optimizer, budget: ShardPlanConstraints
) -> ShardPlan | str:
    """Decide whether a trial may run the user's own code unchanged; runs none of the code.

    Returns:
        A plan as of `uncaptured_plan`, or a short reason for cutting the model.
    """
    capture_reason = _asked_for_capture(task, budget)
    if capture_reason is not None:
        return capture_reason
    plan = state_plan(task, model, optimizer, budget)
    cost, room = plan.shards[0].cost, format_bytes(budget.budget_bytes)
    # Two limits: an update has all of the state on the device and no activations, a backward has activations beside
    # parameters and gradients.
    if plan.peak_bytes > _MOST_STATE * budget.budget_bytes:
        return f"its state alone needs {format_bytes(plan.peak_bytes)} of the smallest device's budget of {room}"
    fixed_bytes = cost.state_bytes + cost.trained_bytes
    if fixed_bytes > _MOST_HELD * budget.budget_bytes:
        return (
            f"its parameters and gradients ({format_bytes(fixed_bytes)}) leave little of the smallest device's budget of "
            f"{room}"
        )
    return plan


def state_plan(
    task: TrainTask, model: nn.Module, optimizer: torch.optim.Optimizer, budget: ShardPlanConstraints
) -> ShardPlan:
    """Make the plan of a trial that runs the user's own code, as of `uncaptured_plan`; runs none of the code."""
    specs = state_specs(model)
    return uncaptured_plan(specs, _update_of(optimizer, model, specs, budget), task, alignment=budget.alignment)


def _asked_for_capture(task: TrainTask, budget: ShardPlanConstraints) -> str | None:
    """The option that needs a captured step, as a reason, or None."""
    if budget.num_shards is not None:
        return f"num_shards={budget.num_shards!r} asks for a cut"
    if budget.optimizer_placement == "host":
        return "optimizer_placement='host' asks for updates on the host"
    for name in ("compile", "split_operators"):
        if getattr(task, name) is not None:
            return f"{name}={getattr(task, name)!r} asks for a captured step"
    if task.splits_steps:
        return f"parallel={task.parallel!r} runs the batches of a captured step on several devices"
    if task.split_batches == "auto":
        return "split_batches='auto' is chosen by what a captured step needs"
    return None


def _update_of(
    optimizer: torch.optim.Optimizer, model: nn.Module, specs: dict[str, StateSpec], budget: ShardPlanConstraints
) -> UpdatePilot:
    """Make a pilot for an optimizer: torch's own steps are measured on stand-ins, the others are guessed.

    A step of the user's own could change objects shared with the stand-ins. A guess also serves optimizers that do not
    accept stand-ins (`SparseAdam` requires sparse gradients).
    """
    # The class may be the user's: a derived class may leave the step to torch.
    is_torchs = type(optimizer).step.__module__.partition(".")[0] == "torch"
    parameters: dict[str, Tensor] = {name: tensor for name, tensor in model.named_parameters() if name in specs}

    def measured(names: Sequence[str]) -> tuple[int, int, int]:
        nbytes = sum(_state_bytes(specs[name], budget.alignment) for name in names)
        state_bytes, temporary_bytes = _GUESSED_STATES * nbytes, nbytes if budget.uses_foreach else 0
        guess = state_bytes, temporary_bytes, state_bytes + temporary_bytes
        if not is_torchs:
            return guess
        try:
            # Optimizers ask `torch.compiler.is_compiling()`, which a capture in another thread would change.
            with GATE.shared():
                pilot = optimizer_pilot(
                    optimizer, parameters, specs, alignment=budget.alignment, uses_foreach=budget.uses_foreach
                )
                return pilot(names)
        except Exception:  # noqa: BLE001 - the step itself will raise the error
            return guess

    return measured


def uncaptured_plan(specs: dict[str, StateSpec], update: UpdatePilot, task: TrainTask, *, alignment: int) -> ShardPlan:
    """Make a plan for a trial that will run its own code, from the bytes of its state alone.

    Returns:
        A plan with a single shard. The costs include parameters, buffers, gradients and optimizer state, but no
        activations.
    """
    trained = tuple(name for name, spec in specs.items() if spec.requires_grad)
    none = batches.flatten(())
    cost = _cost(
        specs,
        trained,
        none,
        # Gradients are the only part of the workspace that is known before the first step.
        EagerCost(names=(), workspace=sum(_state_bytes(specs[name], alignment) for name in trained)),
        update,
        # A burst ends between two optimizer steps, so no sum of gradients waits between its units.
        replace(GradientRules.of(task), accumulate=1, is_split=False),
        alignment=alignment,
        training=True,
    )
    shard = Shard(
        graph=_graph(_uncaptured, tuple(specs), none, ()),
        cost=cost,
        needs_gradient=frozenset(),
        gradient_outputs=(),
        losses=(),
        trained=trained,
        shared_gradients=(),
        has_backward=True,
    )
    return ShardPlan(
        mode="train",
        shards=(shard,),
        names=(),
        outputs=(),
        constants={},
        birth={},
        first_use={},
        last_use={},
        eager=True,
        why_eager="it fits its device, and runs its own code",
    )


def _uncaptured(*_: Tensor) -> tuple[Tensor, ...]:
    raise AssertionError("a trial that runs its own code has no units of a graph")


def _spilled(
    pilot: EagerPilot,
    kept: ShardCost,
    cost_of: Callable[[EagerCost], ShardCost],
    budget_bytes: int,
    reason: CaptureError,
) -> ShardCost:
    """Cost with the activations spilled, if the step then fits.

    Raises:
        BudgetError: the step does not fit even with its activations spilled.
    """
    least, outcome = kept.peak_bytes, ""
    # Spilled activations lower only the peak of the backward unit.
    if kept.backward_bytes > budget_bytes:
        try:
            cost = cost_of(pilot.spilling())
        except CaptureError as error:
            outcome = f", and its activations cannot be spilled: {error}"
        else:
            if cost.peak_bytes <= budget_bytes:
                return cost
            outcome = f", and {format_bytes(cost.peak_bytes)} with its activations spilled"
            least = min(least, cost.peak_bytes)
    raise BudgetError(
        f"the model cannot be cut ({reason}), and whole it needs {format_bytes(kept.peak_bytes)} at once, more than the "
        f"smallest device's budget of {format_bytes(budget_bytes)}{outcome}; make it capturable, lower batch_size, or raise "
        f"device_memory to at least {format_bytes_up(least)}",
        enough_bytes=least,
    ) from reason


def _graph(
    step: Callable[..., tuple[Tensor, ...]], state: tuple[str, ...], leaves: batches.BatchLeaves, names: tuple[str, ...]
) -> ShardGraph:
    return ShardGraph(
        module=step,
        first=0,
        last=1,
        state=state,
        constants=(),
        inputs=tuple(range(len(leaves.tensors))),
        live_in=(),
        live_out=names,
        cloned=frozenset(),
        written_state=(),
        saved_state=(),
        # Unknown for the user's own code, so assumed.
        stochastic=True,
    )


def _cost(
    specs: dict[str, StateSpec],
    trained: tuple[str, ...],
    leaves: batches.BatchLeaves,
    eager: EagerCost,
    update: UpdatePilot | None,
    rules: GradientRules,
    *,
    alignment: int,
    training: bool,
) -> ShardCost:
    optimizer_bytes, later, first = update(trained) if update else (0, 0, 0)
    trained_bytes = sum(_state_bytes(specs[name], alignment) for name in trained)
    scratch = rules.scratch_bytes(len(trained), alignment)
    return ShardCost(
        state_bytes=sum(_state_bytes(spec, alignment) for spec in specs.values()),
        value_bytes=sum(aligned(batches.tensor_bytes(t), alignment) for t in leaves.tensors),
        handed_bytes=0,
        optimizer_bytes=optimizer_bytes,
        forward_workspace=0 if training else eager.workspace,
        backward_workspace=eager.workspace + scratch if training else 0,
        update_workspace=later + scratch,
        first_update_workspace=first + scratch,
        trained_bytes=trained_bytes,
        phased=rules.has_two_phases or rules.accumulates,
        spilled_bytes=eager.spilled_bytes,
        summed_bytes=trained_bytes if rules.accumulates else 0,
    )


def _state_bytes(spec: StateSpec, alignment: int) -> int:
    elements = 1
    for size in spec.shape:
        elements *= size
    return aligned(elements * spec.dtype.itemsize, alignment)
