"""`LoopTask`: a training loop of the user's own as a task.

The function gets a `Loop` (`train/own_loop/handle.py`), registers the objects to train, and marks the end of each unit of
work. `HydraExecutor.loop` (`executor.py`) makes a `LoopTask`; people import `LoopTask` from `hydra_tune` to return the task
from an Optuna objective. `Pool` (`pool/pool.py`) chooses a `LoopTrial` (`train/own_loop/loop_trial.py`), which runs the
function in a pool; `train/own_loop/plain.py` runs the function for `train_plain` (`train/loop/reference_loop.py`).
`HydraExecutor.profile` and `HydraExecutor.plan` call `refuse_loops`, and Ray's trials refuse a loop
(`integrations/hydra_tune_ray/node/pool_runtime.py`). The pool never fuses a loop (`pool/fusion/fusion_hint.py`) or cuts a
loop into shards.

Note: a `LoopTask` is a `TrainTask` whose factories raise: code that reads a task must ask for the class before the factories.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Never

from torch import nn

from hydra_tune.closures import ClosureSnapshot
from hydra_tune.errors import ConfigError, TaskError
from hydra_tune.task import Batch, DataHandle, Precision, TrainTask, check_choice, check_positive, check_seed

_OWN = frozenset({"fn", "steps", "metric", "precision", "result", "seed"})


def _no_model(*_: Any) -> Never:
    raise TaskError(
        "a LoopTask has no model=: its function builds the model; build it as the function does, and load the weights with "
        "load_state_dict(hydra_tune.checkpoint.tensors.load_tensors(path)[0])"
    )


def refuse_loops(tasks: Iterable[object], what: str) -> None:
    """Refuse loops where their code would have to be known without being run.

    Raises:
        ConfigError: a task is a `LoopTask`.
    """
    if any(isinstance(task, LoopTask) for task in tasks):
        raise ConfigError(
            f"{what} cannot tell of a LoopTask, whose function nobody knows before it runs; leave the loop out, or describe "
            "the training with a TrainTask"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTask(TrainTask):
    """A training loop of your own, described and not yet run.

    `hydra_tune.train_plain` calls the function outside of a pool, with the same numbers.

    Args:
        fn: `(loop) -> None`, the loop; in a pool runs in a thread of its own. `loop.register(...)` hands over what is trained,
            `loop.step()` ends a unit, `loop.report(...)` reports. See docs/howto/loop.md.
        steps: calls of `loop.step()` to come in all, by which the scheduler knows the remaining time; `loop.register` may
            give the number instead. None: as many again as so far.
        metric: metric reported to the tuner: a name, or several names for several objectives.
        precision: precision of the `torch.autocast` that the loop enters, if any. Only the way in which memory is
            measured depends on the precision; with autocast and `"float32"`, the first steps may round differently.
        result: report that gives the trial's value to a tuner: the `"last"` or the `"best"`.
        seed: seeds the trial's random streams before the function is called.

    Raises:
        TaskError: an argument that cannot be right, or one of `TrainTask` that the function has to do itself.
    """

    fn: Callable[[Any], object] = field(kw_only=False)
    steps: int | None = None
    model: Callable[[], nn.Module] = field(default=_no_model, repr=False)
    optimizer: Callable[[Any], Any] = field(default=_no_model, repr=False)
    train: DataHandle | Callable[[], Iterable[Batch]] = field(default=_no_model, repr=False)
    metric: str | tuple[str, ...] = "value"
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TaskError(
                f"LoopTask takes a function of the loop, not {type(self.fn).__name__}; give def fn(loop): ..."
            )
        for each in fields(self):
            if each.name not in _OWN and getattr(self, each.name) != each.default:
                raise TaskError(
                    f"a LoopTask takes no {each.name}=, which its function has to do itself; describe the training with a "
                    "TrainTask to give it"
                )
        if self.steps is not None:
            check_positive("steps", self.steps)
        check_choice("precision", self.precision, ("float32", "bfloat16", "float16"))
        check_choice("result", self.result, ("last", "best"))
        check_seed(self.seed)
        names: tuple[object, ...] = self.metric if isinstance(self.metric, tuple) else (self.metric,)
        if not names or not all(isinstance(name, str) and name for name in names):
            raise TaskError(f"metric must be a name or a tuple of names, not {self.metric!r}")
        # The dataclass is frozen: only object's own __setattr__ can fill the slot.
        object.__setattr__(self, "_closures", ClosureSnapshot({"fn": self.fn}))
