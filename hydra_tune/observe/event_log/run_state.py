"""Reads the state of a run from its event log: whether its process lives, and how far its trials have come.

`hydra-tune list` and `hydra-tune status`, and the commands that find a run (`show`, `best`, `plot`, `export`), call
`read_run_state` for each log of a folder through `cli/inspect/run_scan.py`, while the run goes on or afterwards.
`cli/inspect/sweep_run_record.py` reads the `RunState`. Beside the header, only the lines about jobs, the sweep and the end are
parsed, because units and copies fill most of a log. The module must not import torch, so that `hydra-tune list` answers at
once.

Note: liveness. The writer of a log holds the system's lock of the file (`flock`) as long as the file is open. The lock
ends with the process, however the process ends: an unlocked log without a last line belongs to a killed run. On a file system
without locks, no run counts as alive.
"""

import fcntl
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra_tune.errors import ConfigError
from hydra_tune.observe.event_log.line_format import CARRIER, KEY
from hydra_tune.observe.live.snapshot import TrialView

_READ = (b'{"event":"job"', b'{"event":"sweep"', b'{"event":"end"')
_KEY = re.compile(r"(\d+):(.*)", re.DOTALL)  # of a job: the pool's number and the name
_TRIAL = re.compile(r"trial (\d+)")
_STATES = {"submitted": "queued", "preparing": "preparing", "running": "running", "begins again": "queued"}


@dataclass(slots=True, kw_only=True)
class RunState:
    """A run, as far as its log says.

    Args:
        is_alive: whether the process of the run still has the log open.
        sweep: facts that `hydra-tune sweep` has noted about its study; empty for other programs.
        trials: by name of the job, with the job's number where an earlier job has the name; values as last reported;
            `epochs` where reports are those of epochs.
        names: names in `trials` by the jobs' keys.
        restarted: first keys of the jobs that have begun again; such a job goes on under its first key, "~" and a number.
    """

    path: Path
    started_at: datetime
    is_alive: bool
    is_ended: bool = False
    sweep: Mapping[str, Any] = field(default_factory=dict)
    trials: dict[str, TrialView] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    restarted: set[str] = field(default_factory=set)


def read_run_state(path: Path) -> RunState | None:
    """Read the state of a run.

    Returns:
        The state; None for a file that is no event log.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        # Before the lines: a run that ends in between has a last line, and does not seem killed.
        is_alive = _is_locked(path)
        with path.open("rb") as file:
            header = _parsed(file.readline())
            if KEY not in header:
                return None
            state = RunState(path=path, started_at=datetime.fromisoformat(str(header["started_at"])), is_alive=is_alive)
            for data in map(_parsed, (line for line in file if line.startswith(_READ))):
                _take(state, data)
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}; give another folder") from error
    except (KeyError, ValueError):
        return None
    return state


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Shared, so that two readers do not take each other for the writer.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError:  # the last line of a killed run, or a file that is no log
        return {}
    return data if isinstance(data, dict) else {}


def _take(state: RunState, data: Mapping[str, Any]) -> None:
    match data.get("event"):
        case "end":
            state.is_ended = True
        case "sweep" if data.get("what") == "opened":
            state.sweep = data
        case "sweep":
            _take_trial(state, data)
        case "job":
            _take_job(state, data)


def _take_trial(state: RunState, data: Mapping[str, Any]) -> None:
    """Take the sweep's own account of a trial, which holds for fused trials, too."""
    name = f"trial {data['number']}"
    names = ("state", "params", "epochs", "value", "error")
    facts = {key: number_of(data[key]) for key in names if data.get(key) is not None}
    state.trials[name] = replace(state.trials.get(name, _new(name, len(state.trials))), **facts)


def _take_job(state: RunState, data: Mapping[str, Any]) -> None:
    key, what = data["job"], data["what"]
    if key.startswith(CARRIER):  # its trials are jobs of their own
        return
    if (first_key := key.rpartition("~")[0]) in state.restarted:
        key = first_key
    if what == "begins again":
        state.restarted.add(key)
    name = state.names[key] = state.names.get(key) or _name_of(key, state)
    view = state.trials.get(name, _new(name, len(state.trials)))
    if what == "report":
        metrics = {key: number_of(value) for key, value in data["metrics"].items()}
        value = metrics.get(state.sweep.get("metric"))
        changes: dict[str, Any] = {"state": "running", "metrics": metrics or view.metrics, "step": data["step"]}
        view = replace(view, **changes, value=view.value if value is None else value)
    elif what == "over" and not state.sweep:
        view = replace(view, state=data["status"], metrics=dict(data["metrics"]) or view.metrics, error=data["error"])
    elif what in _STATES:
        view = replace(view, state=_STATES[what])
    state.trials[name] = view


def _name_of(key: str, state: RunState) -> str:
    match = _KEY.fullmatch(key)
    if match is None:
        return key
    number, name = match.groups()
    if name == "job":  # `Pool.submit` writes so for jobs without a name, and calls them by the key's number
        return f"job {number}"
    # A program may give two jobs one name; a sweep's trials have names of their own.
    return f"{name} (job {number})" if name in state.trials and not state.sweep else name


def _new(name: str, count: int) -> TrialView:
    match = _TRIAL.fullmatch(name)
    return (
        TrialView(number=count, state="queued", name=name)
        if match is None
        else TrialView(number=int(match[1]), state="queued")
    )


def number_of(value: Any) -> Any:
    """Undo `observe.live.text.plain`: the texts of NaN and infinities become numbers again."""
    return float(value) if value in ("nan", "inf", "-inf") else value
