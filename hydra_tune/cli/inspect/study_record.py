"""The interface between the command line and a tuner's studies.

`study_reader` (`run_scan.py`) finds a `StudyReader` through the entry points `hydra_tune.studies`: for the scan itself,
for `cli/commands/plot.py` and `cli/run/export.py`, which draw, and for `check_beginning` (`cli/run/sweep_run.py`), which
checks for `hydra-tune sweep` and `hydra-tune check`. Optuna's reader is in `integrations/hydra_tune_optuna/study_reader.py`.
Only `check` may import torch, so that `hydra-tune list` answers at once. The module must not know a tuner.
"""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.observe.live.snapshot import Goal, TrialView

STUDIES = "hydra_tune.studies"
"""Group of entry points: each of a class without arguments that is a `StudyReader`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """A study as its storage has it.

    Args:
        name: of the study.
        goals: one for each objective.
        trials: all trials, by number; `params` are as the tasks were given them, `step` is the last reported step, `metrics`
            has numbers that a program has noted, and with several objectives their values.
        best: numbers of the best trials: one, or with several objectives the Pareto front.
        started_at: start of the first trial; None without trials.
    """

    name: str
    goals: tuple[Goal, ...]
    trials: tuple[TrialView, ...]
    best: tuple[int, ...]
    started_at: datetime | None = None


class StudyReader(Protocol):
    """Reads studies; creates and changes no study and no storage."""

    def read(self, storage: str) -> tuple[StudyRecord, ...]:
        """Read all studies of a storage, by name.

        Raises:
            ConfigError: the storage does not exist, or cannot be read.
        """

    def check(self, spec: SweepSpec, *, resume: bool) -> tuple[int, int | None]:
        """Refuse a sweep that cannot begin; with `resume`, the study must be there.

        Returns:
            The trials of the study that have ended, and the trials that would run; None: without limit.

        Raises:
            ConfigError: the storage cannot be opened, its study has another direction or other parameters, or there is no
                study to resume.
        """

    def plot(self, storage: str, study: str, path: Path) -> tuple[str, ...]:
        """Draw a study into a file, `.png` or `.html`: learning curves, parallel coordinates and importances.

        Returns:
            A sentence for each picture that could not be drawn.

        Raises:
            ConfigError: a library is missing, the study is missing, or no picture can be drawn.
            OSError: the file cannot be written.
        """
