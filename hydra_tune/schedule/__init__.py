"""Scheduling of shard units over time and devices: pure Python, no torch, no clock, no threads.

`Scheduler` takes events and returns commands; a `Policy` chooses among eligible jobs. The library's drivers are
`pool/runtime/dispatcher.py` in a pool, `pool/dry_run/executor.py` in a forecast, `simulate/engine/simulator.py` in a
simulation, and `simulate/recorded/replay.py` in a replay. The package knows jobs and devices by name only, and never
interprets a unit's kind. No object here takes a lock, because a driver calls from one thread or under a lock of its own. The
package must import neither torch nor a driver. Read `units`, `events` and `commands` first, then `machine`, the state machine,
with `state`, `record` and `transitions`; the `policies` come next.
"""

from hydra_tune.schedule.ahead import NextJobPredictor
from hydra_tune.schedule.bound import makespan_bound, uneven_makespan_bound
from hydra_tune.schedule.commands import Admit, Command, EndBurst, Release, Run
from hydra_tune.schedule.events import (
    DeviceAdded,
    DeviceLost,
    DeviceSlowed,
    Event,
    JobAdmitted,
    JobPaused,
    JobRejected,
    JobResumed,
    JobStopped,
    JobSubmitted,
    JobUnpaused,
    PriorityChanged,
    ShardMoved,
    UnitFailed,
    UnitFinished,
)
from hydra_tune.schedule.front import ADMISSIONS, check_admission
from hydra_tune.schedule.machine import Scheduler
from hydra_tune.schedule.policies.early import EarlyBinding
from hydra_tune.schedule.policies.fair import Fair
from hydra_tune.schedule.policies.fifo import Fifo
from hydra_tune.schedule.policies.heap import Smallest, ViewHeap
from hydra_tune.schedule.policies.lpt import LPT
from hydra_tune.schedule.policies.lrtf import ShardedLRTF
from hydra_tune.schedule.policies.lrtf_paper import LRTFPaper
from hydra_tune.schedule.policies.policy import BindsEarly, IncrementalPolicy, JobView, Policy, Selection, SpeedAware
from hydra_tune.schedule.policies.random_choice import RandomChoice
from hydra_tune.schedule.policies.registry import ENTRY_POINTS, POLICIES, check_policy_name, make_policy
from hydra_tune.schedule.policies.round_robin import RoundRobin
from hydra_tune.schedule.policies.srtf import SRTF
from hydra_tune.schedule.record import JobPhase
from hydra_tune.schedule.units import Unit

__all__ = [
    "ADMISSIONS",
    "ENTRY_POINTS",
    "LPT",
    "POLICIES",
    "SRTF",
    "Admit",
    "BindsEarly",
    "Command",
    "DeviceAdded",
    "DeviceLost",
    "DeviceSlowed",
    "EarlyBinding",
    "EndBurst",
    "Event",
    "Fair",
    "Fifo",
    "IncrementalPolicy",
    "JobAdmitted",
    "JobPaused",
    "JobPhase",
    "JobRejected",
    "JobResumed",
    "JobStopped",
    "JobSubmitted",
    "JobUnpaused",
    "JobView",
    "LRTFPaper",
    "NextJobPredictor",
    "Policy",
    "PriorityChanged",
    "RandomChoice",
    "Release",
    "RoundRobin",
    "Run",
    "Scheduler",
    "Selection",
    "ShardMoved",
    "ShardedLRTF",
    "Smallest",
    "SpeedAware",
    "Unit",
    "UnitFailed",
    "UnitFinished",
    "ViewHeap",
    "check_admission",
    "check_policy_name",
    "make_policy",
    "makespan_bound",
    "uneven_makespan_bound",
]
