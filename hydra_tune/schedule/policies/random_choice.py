"""`RandomChoice`: any eligible job. The baseline that every policy has to beat.

`make_policy` (`registry.py`) makes this policy for the name `"random"`, with seed 0; `PriorityLevels` (`schedule/levels.py`)
asks the policy's selection for a job for each idle device. The module must not draw from Python's global stream, which is
the user's.
"""

import random
from dataclasses import dataclass

from hydra_tune.schedule.policies.policy import IncrementalPolicy, JobView, Selection


@dataclass(frozen=True, kw_only=True)
class RandomChoice(IncrementalPolicy):
    """An eligible job, all equally likely, drawn from a stream determined by the seed and the questions asked.

    Args:
        seed: seed of the stream.
    """

    seed: int = 0

    def start(self) -> Selection:
        """Make an empty selection with a stream of its own."""
        return _RandomSelection(self.seed)


class _RandomSelection:
    def __init__(self, seed: int) -> None:
        self._stream = random.Random(seed)  # noqa: S311 - a schedule, no secret
        self._views: list[JobView] = []
        self._places: dict[str, int] = {}

    def add(self, view: JobView) -> None:
        """Append the job."""
        self._places[view.job] = len(self._views)
        self._views.append(view)

    def remove(self, view: JobView) -> None:
        """Remove the job; the last job moves to the vacant place."""
        # O(1): the order of the list does not matter for a uniform draw.
        place, last = self._places.pop(view.job), self._views.pop()
        if last is not view:
            self._views[place] = last
            self._places[last.job] = place

    def choose(self, device: str) -> JobView:  # noqa: ARG002 - every device is served alike
        """Draw a job."""
        return self._views[int(self._stream.random() * len(self._views))]
