"""Rules of a task for gradients, as far as the rules decide the bytes of units.

The pilots (`shard/cost/pilot.py`, `shard/cost/eager_pilot.py`) measure units by these rules before a plan exists,
`partition_planner.py` and `shard/execute/eager_plan.py` follow the rules in cuts and whole plans, and `key_of`
(`plan_request.py`) puts the rules into the key of a training plan, as a forecast (`pool/dry_run/report.py`) does into a key of
its own. Each option of a task that changes the bytes of gradients must enter the rules, because trials of equal rules
share plans.
"""

from dataclasses import dataclass

import torch

from hydra_tune.shard.capture.step_module import Objective, objective
from hydra_tune.task import TrainTask


@dataclass(frozen=True, slots=True)
class GradientRules:
    """Origin and use of gradients.

    Args:
        accumulate: number of batches per step.
        is_scaled: whether the loss is scaled.
        is_clipped: whether the norm of all gradients is clipped.
        is_split: whether batches are cut into pieces.
    """

    accumulate: int = 1
    is_scaled: bool = False
    is_clipped: bool = False
    is_split: bool = False

    @classmethod
    def of(cls, task: TrainTask) -> "GradientRules":
        """Return the rules of a task."""
        return cls(task.accumulate, task.precision == "float16", task.max_grad_norm is not None, task.num_pieces > 1)

    @property
    def accumulates(self) -> bool:
        """Whether gradients of several batches, or of pieces of a batch, are added up."""
        return self.accumulate > 1 or self.is_split

    @property
    def has_two_phases(self) -> bool:
        """Whether every update must wait for all gradients of the step."""
        return self.is_scaled or self.is_clipped

    @property
    def objective(self) -> Objective:
        """Objective of the backward with an arbitrary loss scale, for measuring."""
        # Any share but 1 will do: the multiplication, and so its temporary, is left out only for 1.
        return objective(self.accumulate, torch.ones(()) if self.is_scaled else None, 0.5 if self.is_split else 1.0)

    def scratch_bytes(self, count: int, alignment: int) -> int:
        """Bytes of the scalars made by unscaling and clipping the gradients of `count` parameters."""
        return (4 * count + 8) * alignment if self.has_two_phases else 0
