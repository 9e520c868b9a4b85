"""Lines of the event log about the life of jobs, from the scheduler's events and commands and from results.

`JobDispatcher` (`pool/runtime/dispatcher.py`) logs each decision, retry and end, and `Pool.begin_again` (`pool/pool.py`)
the retry of a fused job. `pool/fusion/group_matcher.py` logs the chosen size of a group, and the plan of a group beyond a
device's room. `pool/fusion/live_group.py` logs the measured times of planned steps. Reports come from `JobState`
(`pool/runtime/job_state.py`). With fusion, decisions and reports are those of carriers, whose keys begin with `CARRIER`;
`FusedJob` (`pool/fusion/fused_job.py`) logs the lives of the trials up to their ends.

Note: the names and fields of the lines are part of the format (`observe/event_log/line_format.py`, docs/reference/events.md).
The module must change nothing in a job, and may run under the pool's lock.
"""

from collections.abc import Sequence
from dataclasses import asdict

from hydra_tune.fusion.matching.group_size_chooser import GroupSizeChoice
from hydra_tune.fusion.runtime.plan_autotuner import AutotuneResult
from hydra_tune.fusion.runtime.plan_report import PlannedSizeChoice
from hydra_tune.observe.event_log.writer import EventLog
from hydra_tune.pool.job import Job, Result
from hydra_tune.schedule import (
    Admit,
    Command,
    Event,
    JobAdmitted,
    JobPaused,
    JobRejected,
    JobResumed,
    JobStopped,
    JobSubmitted,
    JobUnpaused,
    PriorityChanged,
)

_PLAIN = (JobAdmitted, JobRejected, JobResumed, JobStopped, JobPaused, JobUnpaused)
_WITH_PRIORITY = (JobSubmitted, PriorityChanged)
_NAMES: dict[type, str] = {
    JobSubmitted: "submitted",
    JobAdmitted: "running",
    JobRejected: "rejected",
    JobResumed: "resumed",
    JobStopped: "stopped",
    JobPaused: "paused",
    JobUnpaused: "unpaused",
    PriorityChanged: "priority",
}


def log_decision(log: EventLog, at_ns: int, events: Sequence[Event], commands: Sequence[Command]) -> None:
    """Log the events and commands of a decision, without the events of units, which are logged by the workers.

    Called for every unit.
    """
    for event in events:
        if isinstance(event, _PLAIN):
            log.job(event.job, _NAMES[type(event)], at_ns)
        elif isinstance(event, _WITH_PRIORITY):
            log.job(event.job, _NAMES[type(event)], at_ns, priority=event.priority)
    for command in commands:
        if type(command) is Admit:
            log.job(command.job, "preparing", at_ns)


def log_retry(log: EventLog | None, job: str, error: BaseException) -> None:
    """Log that a job has failed and begins again; `job` is the key of the failed run."""
    if log is not None:
        log.job(job, "begins again", error=f"{type(error).__name__}: {error}".splitlines()[0])


def log_fusion(log: EventLog | None, job: str, choice: GroupSizeChoice, trials: int) -> None:
    """Log how many waiting trials are computed together; `job` is the carrier."""
    if log is None:
        return
    timing = choice.timing
    log.job(
        job,
        "fusion",
        size=choice.size,
        trials=trials,
        why=choice.why,
        alone_seconds=None if timing is None else timing.alone_seconds,
        drawing_seconds=None if timing is None else timing.drawing_seconds,
        group_seconds={} if timing is None else dict(timing.group_seconds),
    )


def log_plan(log: EventLog | None, job: str, choice: PlannedSizeChoice, trials: int) -> None:
    """Log how trials beyond a device's room are computed together; `job` is the carrier."""
    if log is not None:
        log.job(job, "plan", trials=trials, told=list(choice.told), ways=[asdict(way) for way in choice.ways])


def log_measured(log: EventLog | None, job: str, found: AutotuneResult) -> None:
    """Log the measured time of a job's planned steps."""
    if log is not None:
        log.job(job, "measured", told=[found.told], **asdict(found))


def log_end(log: EventLog, job: Job, result: Result) -> None:
    """Log the end of a job."""
    lines = [] if result.error is None else (str(result.error).strip().splitlines() or [""])[:1]
    log.job(
        job.key,
        "over",
        status=result.status,
        metrics=result.metrics,
        num_shards=result.num_shards,
        units_run=result.units_run,
        units_saved=result.units_saved,
        error=f"{type(result.error).__name__}: {lines[0]}" if lines else None,
    )
