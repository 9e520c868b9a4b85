"""`LRTFPaper`: Sharded-LRTF as printed in the paper, for comparison.

`make_policy` (`registry.py`) makes this policy for the name `"lrtf_paper"`, as a heap and with late binding. `PriorityLevels`
(`schedule/levels.py`) asks the policy's selection for a job for each idle device. `benchmarks/locality.py`,
`benchmarks/decisions.py` and people make an `LRTFPaper` with other options. The choices must stay those of the paper, apart
from the entries under Differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hydra_tune.errors import ConfigError
from hydra_tune.schedule.policies.early import EarlyBinding
from hydra_tune.schedule.policies.heap import Smallest
from hydra_tune.schedule.policies.policy import IncrementalPolicy, JobView, ScanSelection, Selection


@dataclass(frozen=True, kw_only=True)
class LRTFPaper(IncrementalPolicy):
    """The job with the longest remaining time, wherever its shards are; among equals the earliest submitted.

    Args:
        structure: `"scan"` is Algorithm 2's loop over all models. `"heap"` is the structure of the footnote "an
            alternate data structure to record shard references can enable even constant-time selection": the choice is
            the top of a heap, and the cost is O(log n) to put a job back when its unit is finished. Both choose the
            same job.
        idle_only: choose for the buffer, as in section 5.2: when a unit starts on a device, choose the device's next
            unit among the models that are idle then. See `EarlyBinding`.

    Source:
        HYDRA (Nagrecha and Kumar), sections 5.2 and 5.3, Algorithm 2 and footnote 4.

    Differs:
        * The printed formula, cut off after `((m_e - 1) x m_b + m_ce - 1) x`, must be the total remaining time, `... x
          m_t + m_cm`; `remaining_seconds` is that time.
        * The paper's loop begins with a longest time of 0, and so chooses nothing when no time remains; the policy then
          chooses the earliest submitted job.

    Raises:
        ConfigError: another structure.
    """

    structure: Literal["scan", "heap"] = "heap"
    idle_only: bool = False

    def __post_init__(self) -> None:
        if self.structure not in ("scan", "heap"):
            raise ConfigError(f"structure must be 'scan' or 'heap', not {self.structure!r}")

    def start(self) -> Selection:
        """Make an empty selection."""
        selection = Smallest(_shortness) if self.structure == "heap" else ScanSelection(_Algorithm2Policy())
        return EarlyBinding(selection) if self.idle_only else selection


def _shortness(view: JobView) -> float:
    return min(-view.remaining_seconds, 0.0)  # jobs with no time left are equal, as in the paper's loop


class _Algorithm2Policy:
    def choose(self, device: str, candidates: Sequence[JobView]) -> JobView:  # noqa: ARG002 - the policy's signature
        # Names and loop as in Algorithm 2; `>` keeps the earliest submitted among equals.
        models = sorted(candidates, key=lambda view: view.order)
        max_train_time, max_model = 0.0, models[0]
        for model in models:
            if model.remaining_seconds > max_train_time:
                max_train_time, max_model = model.remaining_seconds, model
        return max_model
