"""Chooses the order of a search's trials for its pruner, and checks whether the pruner can work at the pool's width.

Trials that advance together end together. A pruner that compares with *completed* trials has nothing to compare with until
the first trials end; where all trials of a search advance together, such a pruner never ends any. So such a search is
staggered (`choose_admission`), unless the executor's `admission=` decides, or the search has several objectives or fewer
than two trials for each device. `PoolStudy.optimize` (`pool_study.py`) asks `choose_admission` and `useless_pruner` before
each search, and `run_sweep` (`sweep.py`) before each sweep of the command line. During a search `OptimizeDriver`
(`driver.py`) applies the chosen `RunAheadRule` to the reports of trials that run alone and have steps left. The thread that
runs the search makes all these calls.

Note: trials that run ahead. Staggered trials end early, but an idle device still trains trials that the pruner cannot judge
yet. So, until enough trials have completed, the oldest trials run ahead, and any other trial waits at its first report that
the pruner could judge. Up to half of the devices may idle meanwhile. In exchange hardly any trial is trained that the pruner
would have ended, so the search is over as early as without waiting (`benchmarks/admission.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from optuna.study import Study
from optuna.trial import TrialState

from hydra_tune import HydraExecutor
from hydra_tune_optuna.optuna_internals import compares_with_completed, completed_needed, judged_from


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunerRemedies:
    """Remedies for a pruner that cannot work, as options of a program or of a sweep file.

    Args:
        staggered: let the oldest trials go first.
        narrower: keep fewer trials in flight; `{}` stands for the number.
        other: use a pruner that compares running trials.
    """

    staggered: str = 'HydraExecutor(admission="staggered")'
    narrower: str = "HydraExecutor(max_concurrent={})"
    other: str = "SuccessiveHalvingPruner(min_resource=1)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAheadRule:
    """Which trials wait at a report, because the pruner cannot judge them yet.

    Args:
        needed: completed trials that the pruner requires.
        before: trials completed before the search.
        ahead: trials of the search that run ahead.
        from_step: the first step at which the pruner compares trials.
        at_least: trials that run ahead also when most of those needed have completed.
    """

    needed: int
    before: int
    ahead: int
    from_step: int
    at_least: int = 1

    def holds(self, number: int, step: int, begun: Iterable[int], num_completed: int) -> bool:
        """Return whether the trial `number` waits at a report.

        Args:
            number: number of the trial.
            step: step of the report.
            begun: trials in flight that have begun and are not paused, the trial included.
            num_completed: completed trials of the study.
        """
        if num_completed >= self.needed or step < self.from_step:
            return False
        # Trials that have not begun may wait for memory that the trials held back have.
        missing = self.ahead - (num_completed - self.before)
        return sum(other < number for other in begun) >= max(missing, self.at_least)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionChoice:
    """How the trials of a search advance.

    Args:
        why: for the log; None where the executor's option has decided.
        rule: which trials wait for the pruner; None: none.
        staggered_from: number of the search's trials that are submitted before the staggered ones; 0: all trials are
            staggered; None: no trial is submitted as staggered.
        first_wave: trials in flight until enough have completed, where trials may be fused; None: as many as later.
        first_groups: the most members of a group of the first wave, which has a group for each device.
    """

    why: str | None = None
    rule: RunAheadRule | None = None
    staggered_from: int | None = None
    first_wave: int | None = None
    first_groups: int | None = None


def choose_admission(study: Study, executor: HydraExecutor, *, n_trials: int | None) -> AdmissionChoice:
    """Choose how the trials of a search advance, by the study's pruner, if the executor leaves the choice."""
    if executor.admission != "auto":
        return AdmissionChoice()
    name, num_devices = type(study.pruner).__name__, len(executor.device_names)
    if len(study.directions) > 1 or not compares_with_completed(study.pruner):
        return AdmissionChoice(why=f"All trials in flight advance (eager): {name} does not wait for completed trials")
    needed = completed_needed(study.pruner)
    before = num_completed(study)
    missing = needed - before
    if n_trials is not None and n_trials < 2 * num_devices:
        return AdmissionChoice(
            why=f"All trials in flight advance (eager): {n_trials} trials are fewer than two for each of {num_devices} "
            "devices, and would take longer one after another"
        )
    why = f"The oldest trials go first (staggered): {name} compares with completed trials"
    from_step = judged_from(study.pruner)
    if from_step is None or missing <= 0:
        return AdmissionChoice(why=why, staggered_from=0)
    why += f"; until {needed} have completed, others wait at the first report that it could judge"
    # One by one, a few more trials than devices would take as long as two for each device.
    staggered_from = missing if num_devices < missing < 2 * num_devices else 0
    # At least half of the devices work on, also while the last of the trials needed is far longer than the others.
    half = -(-num_devices // 2)
    rule = RunAheadRule(needed=needed, before=before, ahead=max(missing, half), from_step=from_step, at_least=half)
    first_wave = _first_wave(executor, n_trials, missing)
    if first_wave is None:
        if executor.fusion_size:
            why += "; members of a fused group advance together"
        return AdmissionChoice(why=why, rule=rule, staggered_from=staggered_from)
    first_groups = max(2, -(-first_wave // num_devices))
    return AdmissionChoice(
        why=f"{why}; {first_wave} trials begin, fused in groups of {first_groups} at most",
        rule=rule,
        staggered_from=staggered_from,
        first_wave=first_wave,
        first_groups=first_groups,
    )


def _first_wave(executor: HydraExecutor, n_trials: int | None, missing: int) -> int | None:
    """Return the size of a first wave of fused trials; None where all that keep the devices busy begin at once.

    Members of a group advance together, so the pruner has nothing to judge by before a first group has ended. A search
    on CPUs begins with one group's worth of trials, shared by all devices: a smaller group's step is faster nearly in
    proportion. On a GPU a smaller group may take as long.
    """
    first_wave = max(executor.fusion_size, missing)
    if not executor.fusion_size or first_wave >= executor.width:
        return None
    if not all(name.startswith("cpu") for name in executor.device_names):
        return None
    return None if n_trials is not None and n_trials < executor.width else first_wave


def num_completed(study: Study) -> int:
    """Completed trials of a study, with those of earlier searches and of other processes."""
    return len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))


def num_unjudged(needed: int, abreast: int) -> int:
    """Trials of equal length, `abreast` at a time, that end before the pruner can judge any trial."""
    # Trials end in batches of `abreast`: round up to whole batches.
    return -(-needed // abreast) * abreast


def useless_pruner(
    study: Study,
    executor: HydraExecutor,
    *,
    n_trials: int | None,
    width: int,
    choice: AdmissionChoice | None = None,
    remedies: PrunerRemedies | None = None,
    is_fused: bool = False,
) -> str | None:
    """Explain why the study's pruner cannot end any trial of a search, with remedies; None if the pruner can.

    None also for a pruner that is useless at any width, for several objectives, and where the number of trials is not known.

    Args:
        study: has the pruner and the trials completed before.
        executor: the pool.
        n_trials: trials of the search.
        width: trials in flight.
        choice: how the trials advance; None: as the executor's option says.
        remedies: wording of the remedies; None: options of a program.
        is_fused: whether trials are known to be fused, up to the executor's limit; otherwise fewer trials may advance
            together, and the pruner has more to compare with.
    """
    needed_in_all = completed_needed(study.pruner)
    choice = choice or AdmissionChoice()
    if not needed_in_all or n_trials is None or len(study.directions) > 1:
        return None
    # Members of a fused group advance together, whatever was chosen.
    if choice.first_wave is not None or (choice.rule is not None and not is_fused):
        return None
    # Trials of earlier searches count: the pruner compares with them, too.
    needed = max(0, needed_in_all - num_completed(study))
    abreast = min(width, executor.num_abreast if is_fused else executor.num_abreast_alone)
    if choice.staggered_from is not None and not is_fused:
        abreast = min(abreast, len(executor.device_names))
    working = [number for number in range(1, abreast + 1) if num_unjudged(needed, number) < n_trials]
    # Useless at any number of trials abreast, or useful at this one: there is nothing to advise.
    if not working or abreast in working:
        return None
    words = remedies or PrunerRemedies()
    # The widest setting at which half of the trials can be judged; if none reaches half, the one that judges most.
    narrow = max(number for number in working if num_unjudged(needed, number) <= max(n_trials // 2, needed))
    helping = [words.narrower.format(narrow), words.other]
    # Members of a fused group advance together under either admission.
    if not executor.fusion_size and len(executor.device_names) in working:
        helping.insert(0, words.staggered)
    ended = "has completed" if needed == 1 else "have completed"
    return (
        f"{type(study.pruner).__name__} may prune few or none of {n_trials} trials if they are equally long: {abreast} "
        f"advance together, and it needs {needed} that {ended}; use {', '.join(helping[:-1])}, or {helping[-1]}"
    )
