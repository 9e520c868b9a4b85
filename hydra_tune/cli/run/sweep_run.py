"""Runs a sweep from a checked sweep file: sets up pool, tuner and display.

`cli/commands/sweep.py` calls `run_sweep` in the process of the sweep. `cluster.py` shows its sweep by `show_run`.
`cluster.py`, `export.py`, `cli/dry_run/checking.py` and `cli/dry_run/planning.py` share the exit codes. The two files of
`cli/dry_run/` open their pools by `opened`, and `cli/dry_run/checking.py` asks `check_beginning`. The module must not
import a tuner.

Note: order. The user's function is imported, its signature checked, and the study looked at, before the pool, the
storage or any folder is created. The sweep's folder is locked before the pool and the study exist, and unlocked after
the pool is shut down. At an end by a signal, the trials are settled in the storage before the pool is shut down.
"""

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hydra_tune.checkpoint.sweep_folder import SweepFolder, sweep_path
from hydra_tune.cli.display.board import SweepProgressTracker
from hydra_tune.cli.display.output import SweepOutput
from hydra_tune.cli.inspect.run_scan import study_reader
from hydra_tune.cli.run.interrupt import stops
from hydra_tune.cli.run.task_building import TaskBuilder
from hydra_tune.cli.run.task_ref import load_task
from hydra_tune.cli.run.tuners import TUNERS, find
from hydra_tune.cli.sweep_file.options import DisplayOptions
from hydra_tune.cli.sweep_file.request import SweepRequest
from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.errors import ConfigError, HydraTuneError, SweepFileError
from hydra_tune.executor import HydraExecutor
from hydra_tune.interrupts import Terminated
from hydra_tune.observe.live.snapshot import SweepView
from hydra_tune.paths import absolute_path
from hydra_tune.pool.checkpointing.writer import check_checkpoint_dir
from hydra_tune.pool.job import EventStream, Job
from hydra_tune.pool.stats import PoolStats
from hydra_tune.supervision.supervisor import RestartContext
from hydra_tune.task import TrainTask

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes; 130 is the shells' code for a program ended by Ctrl-C. A sweep ended by SIGTERM exits with 143."""

_SAVING_SHARE = 0.8
"""Share of the stopping time of a sweep for saving trials; the rest is for running units and the summary."""

TUNER = "optuna"

Pool = TypeVar("Pool", bound=HydraExecutor)


class _WatchedExecutor(HydraExecutor):
    """An executor that reports each new job to the board, for the live view, and notes the sweep's facts in the event log."""

    def __init__(self, watch: Callable[[Job], None], **options: Any) -> None:
        super().__init__(**options)
        self._watch = watch

    def submit(
        self, task: TrainTask, name: str | None = None, events: EventStream | None = None, **options: Any
    ) -> Job:
        job = super().submit(task, name=name, events=events, **options)
        self._watch(job)
        return job

    def note(self, **facts: Any) -> None:
        """Note facts about the study or one of its trials in the event log, if there is a log."""
        log = self._started().log
        if log is not None:
            log.sweep(**facts)


def run_sweep(
    spec: SweepSpec,
    display: DisplayOptions,
    *,
    timeout_seconds: float | None,
    timeline: Path | None = None,
    event_log: Path | None = None,
    resume: bool = False,
    beginning: RestartContext | None = None,
) -> int:
    """Run a sweep and show the result; return the exit code of the program.

    No trial starts later than `timeout_seconds`. With `resume`, a study to resume must exist. `beginning` is a supervisor's
    account of the run so far.
    """
    beginning = beginning or RestartContext()
    if timeline is not None and not _is_writable(timeline):
        return FAILED
    output = SweepOutput(display)
    board = SweepProgressTracker(spec, output.log, event_log, beginning.said, display.command)
    try:
        # Up to the end of the pool: running units and loader workers may print until then.
        with output.quiet():
            # Imports user code: a broken task must fail before a folder or a pool exists.
            function, tuner = load_task(spec), find(TUNERS, TUNER)
            check_beginning(spec, resume=resume)
            # Locks the folder before the pool and the study exist, so that a second process of the sweep creates nothing.
            with _own_folder(spec) as folder:
                watched = partial(_WatchedExecutor, board.submitted, record=timeline is not None, event_log=event_log)
                pool = opened(spec, partial(watched, **_saving(spec)))
                board.on_noted = pool.note
                request = SweepRequest(
                    spec=spec,
                    executor=pool,
                    build=TaskBuilder(spec=spec, function=function),
                    observer=board,
                    timeout_seconds=timeout_seconds,
                    folder=folder,
                    crashes=beginning.crashes,
                    aside=beginning.aside,
                )
                words = partial(_first_words, spec, output), partial(_last_words, spec, output)
                # Only now, because an earlier Ctrl-C has no trial to save and may end the command at any point.
                with stops(spec.stop_seconds, board.stop, *words) as stop:
                    # Lets the second signal wait until the storage knows the end of each trial.
                    board.on_settled = stop.settled.set
                    try:
                        show_run(partial(tuner, request), board, output, pool.stats)
                    finally:
                        # In this order: the second signal may end the process as soon as the trials are settled, before
                        # the pool's units end.
                        board.settled()
                        pool.shutdown()
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201 - it is output
        return USAGE
    view = board.snapshot(pool.stats())
    try:
        output.report(view)
    finally:
        # After the report: a full disk must not cost the results of hours. Also where nobody reads the report any more.
        is_written = timeline is None or _written(pool, timeline)
    if not is_written:
        return FAILED
    return _exit_code(view, board.last_error, stop.number)


def _is_writable(path: Path) -> bool:
    """Check whether the timeline can be written, as far as possible before hours of training."""
    if not path.parent.is_dir():
        problem = errno.ENOENT
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = errno.EACCES
    else:
        return True
    print(f"cannot write {path}: {os.strerror(problem)}", file=sys.stderr)  # noqa: T201 - it is output
    return False


def _written(pool: _WatchedExecutor, path: Path) -> bool:
    try:
        pool.recording().write(path)
    except OSError as error:
        print(f"cannot write {path}: {error.strerror}", file=sys.stderr)  # noqa: T201 - it is output
        return False
    return True


def opened(spec: SweepSpec, make: Callable[..., Pool]) -> Pool:
    """Make the pool that a sweep file describes, and open its devices; `make` takes the options of the file.

    Raises:
        SweepFileError: devices are missing or too small; the message begins with the place in the file.
    """
    try:
        pool = make(**spec.engine)
        pool.width  # noqa: B018 - opens the devices, which may not be there or not be as large
    except ConfigError as error:
        # Messages about an option begin with the option's name.
        word = re.match(r"\w*", str(error))
        option_name = word[0] if word is not None and word[0] in spec.engine else None
        place = spec.at(f"hydra.{option_name}") if option_name else spec.at("hydra")
        raise SweepFileError(f"{place}: {error}") from error
    return pool


def check_beginning(spec: SweepSpec, *, resume: bool) -> tuple[int, int | None]:
    """Refuse a sweep that its folder or its study would not let begin; creates nothing.

    With `resume`, the sweep must have run before.

    Returns:
        The trials of the study that have ended, and the trials that would run; None: without limit.

    Raises:
        ConfigError: the sweep cannot begin.
    """
    if resume:
        assert spec.checkpoint_dir is not None, "checked before"
        assert spec.study is not None, "checked before"
        folder = absolute_path(spec.checkpoint_dir)
        if not sweep_path(folder, spec.study).is_dir():
            raise SweepFileError(
                f"--resume: there is no sweep {spec.study!r} in {str(folder)!r} to go on with; give the command in the folder "
                "of the first run, or without --resume to begin another study"
            )
    return study_reader().check(spec, resume=resume)


def _own_folder(spec: SweepSpec) -> "AbstractContextManager[SweepFolder | None]":
    """Lock the sweep's own folder, before any pool or study exists."""
    if spec.checkpoint_dir is None:
        return nullcontext()
    assert spec.study is not None, "checked before"
    try:
        return SweepFolder(check_checkpoint_dir(spec.checkpoint_dir), spec.study)
    except HydraTuneError as error:
        raise SweepFileError(f"{spec.at('hydra.checkpoint_dir')}: {error}") from error


def _saving(spec: SweepSpec) -> dict[str, Any]:
    """Return options of the pool for running alone, not for planning."""
    return {
        "checkpoint_dir": spec.checkpoint_dir,
        "checkpoint_every": spec.checkpoint_every,
        "stop_seconds": _SAVING_SHARE * spec.stop_seconds,
    }


def _first_words(spec: SweepSpec, output: SweepOutput, name: str) -> None:
    saving, lost = " and trials are saved", ""
    if spec.checkpoint_dir is None:
        saving, lost = "", "; the work of running trials is lost, because there is no checkpoint_dir in hydra:"
    output.note(
        f"{name}: the sweep ends when its running units have ended{saving}, in {spec.stop_seconds:g} s at most; a second "
        f"signal ends it at once{lost}"
    )


def _last_words(spec: SweepSpec, output: SweepOutput, why: str) -> None:
    remedy = "" if spec.checkpoint_dir is None else "; trials go on from their last checkpoints with --resume"
    output.abandon(f"sweep {spec.name or spec.task}: {why}{remedy}")


def show_run(
    run: Callable[[], object], board: SweepProgressTracker, output: SweepOutput, stats: Callable[[], PoolStats]
) -> None:
    """Run a tuner, show the sweep meanwhile, and tell the board the end.

    Raises:
        ConfigError: raised before there was a study.
    """
    try:
        with output.showing(lambda: board.snapshot(stats())):
            run()
        board.end()
    except (KeyboardInterrupt, Terminated):
        board.end(interrupted=True)
    except Exception as error:
        # Before there is a study, the sweep itself makes no sense: a usage error, and no result to show.
        if isinstance(error, ConfigError) and not board.is_open:
            raise
        board.end(error=error)  # whatever ended the sweep, show the results so far


def _exit_code(view: SweepView, error: BaseException | None, number: int | None) -> int:
    if view.status == "interrupted":
        return INTERRUPTED if number is None else 128 + number
    if view.status == "completed" and view.count("completed"):
        return DONE
    if error is not None and not isinstance(error, HydraTuneError):  # errors of hydra-tune say enough in one line
        traceback.print_exception(error, file=sys.stderr)
    return FAILED
