"""Where a sweep's event log goes."""

import os
import re
import sys
from datetime import datetime
from pathlib import Path

from hydra_tune.cli.spec import SweepSpec
from hydra_tune.errors import ConfigError
from hydra_tune.observe.eventlog import check_log_path

_FOLDER = "runs"


def log_path(spec: SweepSpec, given: str | None, *, no_log: bool) -> Path | None:
    """The file for the event log: what was asked for, or one of its own for this run in `runs/`, where the command was given.

    Args:
        spec: the sweep.
        given: what was asked for; None: nothing.
        no_log: none is to be written.

    Returns:
        The file; None: no log. Where that is for want of a place that can be written, standard error says so.

    Raises:
        ConfigError: the file that was asked for cannot be written, or it was asked for no file as well.
    """
    if given is not None:
        if no_log:
            raise ConfigError(f"--log {given} and --no-log contradict each other; give one of the two")
        return check_log_path(given, what="--log")
    if no_log:
        return None
    name = re.sub(r"[^\w.-]+", "-", spec.name or Path(spec.file).stem).strip("-.") or "sweep"
    now = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    path = Path(_FOLDER) / f"{name}-{now}-{os.getpid()}.jsonl"
    try:
        check_log_path(path)
    except ConfigError as error:
        print(f"no event log is written: {error}, with --log FILE", file=sys.stderr)  # noqa: T201 - it is output
        return None
    return path
