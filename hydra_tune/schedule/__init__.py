"""When and where each shard unit runs: pure Python, no torch, no clock, no threads.

`Scheduler` takes events and returns commands; a `Policy` chooses among eligible jobs. Knows jobs, units and devices by
name only.
"""

from hydra_tune.schedule.bound import makespan_bound, uneven_makespan_bound
from hydra_tune.schedule.commands import Admit, Command, Release, Run
from hydra_tune.schedule.events import (
    DeviceAdded,
    Event,
    JobAdmitted,
    JobRejected,
    JobResumed,
    JobStopped,
    JobSubmitted,
    ShardMoved,
    UnitFailed,
    UnitFinished,
)
from hydra_tune.schedule.fifo import Fifo
from hydra_tune.schedule.lrtf import ShardedLRTF
from hydra_tune.schedule.machine import Scheduler
from hydra_tune.schedule.policy import JobView, Policy
from hydra_tune.schedule.registry import POLICIES, make_policy
from hydra_tune.schedule.units import Unit

__all__ = [
    "POLICIES",
    "Admit",
    "Command",
    "DeviceAdded",
    "Event",
    "Fifo",
    "JobAdmitted",
    "JobRejected",
    "JobResumed",
    "JobStopped",
    "JobSubmitted",
    "JobView",
    "Policy",
    "Release",
    "Run",
    "Scheduler",
    "ShardMoved",
    "ShardedLRTF",
    "Unit",
    "UnitFailed",
    "UnitFinished",
    "make_policy",
    "makespan_bound",
    "uneven_makespan_bound",
]
