"""Chooses the file of a sweep's event log.

`cli/commands/sweep.py` calls `log_path` once the sweep file is read and merged with the options, except for a sweep on
a Ray cluster. `observe/event_log/writer.py` writes the file. Where a sweep is isolated, the function runs in the
supervising process: the module must create no file, start no thread and import no torch.
"""

import os
import re
import sys
from datetime import datetime
from pathlib import Path

from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.errors import ConfigError
from hydra_tune.observe.event_log.writer import check_log_path

_FOLDER = "runs"


def log_path(spec: SweepSpec, given: str | None, *, no_log: bool) -> Path | None:
    """Choose the file for the event log: the given file, or a new file for this run in `runs/` of the working folder.

    Returns:
        The file; None: no log. If no place for the default file can be written, standard error says so.

    Raises:
        ConfigError: the requested file cannot be written, or both a file and no log are requested.
    """
    if given is not None:
        if no_log:
            raise ConfigError(f"--log {given} and --no-log contradict each other; give one of the two")
        return check_log_path(given, what="--log")
    if no_log:
        return None
    # Without a dot or a dash at the front: neither a hidden file nor an option to the commands that take the file.
    name = re.sub(r"[^\w.-]+", "-", spec.name or Path(spec.file).stem).strip("-.") or "sweep"
    now = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    # The process number tells apart two runs that start within one second.
    path = Path(_FOLDER) / f"{name}-{now}-{os.getpid()}.jsonl"
    try:
        check_log_path(path)
    except ConfigError as error:
        # The error ends with the advice to give another path or file.
        print(f"no event log is written: {error}, with --log FILE", file=sys.stderr)  # noqa: T201 - it is output
        return None
    return path
