"""Finds the runs of a folder or a storage, by event logs, sweep files and storages.

`hydra-tune list` and `hydra-tune status` (`cli/commands/list.py`) call `runs_at`; `show`, `best`, `plot` and `export`
call `find_run`. `cli/commands/plot.py` and `cli/run/export.py` share `kept_study` and `study_reader`, and
`cli/run/sweep_run.py` asks `study_reader`, too. `integrations/hydra_tune_optuna/sweep.py` calls `absolute_storage`, and
`integrations/hydra_tune_optuna/storage_opening.py` uses `STORAGE_FILE`. A run is known by its storage and its study; logs
of one study belong to one run, and a log whose study was in memory is a run of its own. Scanning only reads: an SQLite file
that no sweep file or log names is opened as a storage only if Optuna's tables are there, because Optuna would add the
tables to any other; a locked file counts as having the tables. The module must not import torch or a tuner, so that
`hydra-tune list` answers at once.
"""

import re
import shlex
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hydra_tune.checkpoint.lock import is_locked
from hydra_tune.checkpoint.sweep_folder import sweep_path
from hydra_tune.cli.display.next_step import how_to_go_on, masked
from hydra_tune.cli.inspect.study_record import STUDIES, StudyReader, StudyRecord
from hydra_tune.cli.inspect.sweep_run_record import UNDER_WAY, SweepRunRecord, phase_of
from hydra_tune.cli.run.tuners import find
from hydra_tune.cli.sweep_file.domains import grid_size
from hydra_tune.cli.sweep_file.reader import read_sweep_file
from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.errors import ConfigError, SweepFileError
from hydra_tune.observe.event_log.run_state import RunState, read_run_state
from hydra_tune.observe.live.snapshot import LEFT, TrialView

_LOGS = ("*.jsonl", "runs/*.jsonl")
_SWEEP_FILES = ("*.yaml", "*.yml")
_YAML = (".yaml", ".yml")
_DATABASES = (".db", ".sqlite", ".sqlite3")
# URL of a storage in a file: the beginning, also with a driver's name, the path, and options.
STORAGE_FILE = re.compile(r"(sqlite(?:\+\w+)?:///|journal:(?://)?)([^?]*)(.*)")
_TUNER = "optuna"
_NAMELESS = "no-name-"  # Optuna's own names of studies begin so
_CLOCK_SECONDS = 1.0  # a trial starts in the storage before the log begins; clocks are read at different places


@dataclass(slots=True, kw_only=True)
class _RunParts:
    """Sources that belong to one run."""

    record: StudyRecord | None = None
    storage: str | None = None
    spec: SweepSpec | None = None
    logs: list[RunState] = field(default_factory=list)


def study_reader() -> StudyReader:
    """Find the reader of studies.

    Raises:
        ConfigError: the tuner is not installed.
    """
    return find(STUDIES, _TUNER)()  # type: ignore[no-any-return]


def find_runs(
    folder: Path, storage: str | None = None, also: Path | None = None
) -> tuple[list[SweepRunRecord], list[str]]:
    """Find runs, the newest first.

    Args:
        folder: with sweep files, storages, and event logs there or in `runs`.
        storage: storage of the studies; None: all storages of the folder.
        also: a sweep file or an event log elsewhere.

    Returns:
        The runs, and sentences about sources that could not be read.

    Raises:
        ConfigError: there is no such folder, or the given storage cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {str(folder)!r}; give a folder with runs")
    notes: list[str] = []
    specs = list(_sweep_files(_paths(folder, _SWEEP_FILES, also)))
    logs = [log for path in _paths(folder, _LOGS, also) if (log := _read_log(path, notes)) is not None]
    if storage is not None:
        parts = _studies([absolute_storage(storage, Path.cwd())], notes, is_given=True)
    else:
        parts = _studies(_storages(folder, specs, logs), notes, is_given=False)
    for spec in specs:
        # A path in a sweep file is relative to the folder of the command, which is this folder most of the time.
        place = None if spec.storage is None else masked(absolute_storage(spec.storage, folder))
        for (url, study), part in parts.items():
            # Without a name in the sweep file, the study of each run has a random name.
            if url == place and (spec.study == study or (spec.study is None and study.startswith(_NAMELESS))):
                part.spec = spec
    for log in logs:
        key = _key_of(log)
        if key in parts and _is_of_study(log, parts[key]):
            parts[key].logs.append(log)
        elif storage is None and key not in parts:
            parts[key] = _RunParts(logs=[log])
    runs = [_record(part, folder) for part in parts.values()]
    return sorted(runs, key=lambda run: run.started_at.timestamp() if run.started_at else 0.0, reverse=True), notes


def find_run(name: str | None, storage: str | None) -> SweepRunRecord:
    """Find one run by the user's word for the run, as for `runs_at`; None: the only run of the working folder.

    Raises:
        ConfigError: there is no such run, or several.
    """
    runs, _ = runs_at(name or ".", storage)
    path = Path(name or "")
    if path.is_file():
        # The newest of a sweep whose studies were in memory.
        return runs[0] if runs[0].storage is None else _only(runs, None, runs[0].storage)
    if path.is_dir():
        return _only(_named(runs, None, storage), None, storage)
    return _only(runs, name, storage)


def runs_at(place: str, storage: str | None) -> tuple[list[SweepRunRecord], list[str]]:
    """Find runs by the user's word for them, the newest first.

    Args:
        place: a folder, a sweep file, an event log, an SQLite file, or the name of a study in the working folder.
        storage: storage of the studies; None: any storage of the folder, or that of the file.

    Returns:
        The runs, and sentences about sources that could not be read.

    Raises:
        ConfigError: there is no such file or run, or the storage cannot be read.
    """
    path = Path(place)
    if path.is_file():
        return _runs_of(path, storage), []
    if path.is_dir():
        return find_runs(path, storage)
    runs, notes = find_runs(Path.cwd(), storage)
    return _named(runs, place, storage), notes


def _runs_of(path: Path, storage: str | None) -> list[SweepRunRecord]:
    """Find the runs of a sweep file, an event log or an SQLite file; at least one.

    Raises:
        ConfigError: there is no run, or the storage cannot be read.
    """
    if path.suffix in _DATABASES:
        url = f"sqlite:///{path}"
        return _named(find_runs(Path.cwd(), url)[0], None, url)
    if path.suffix not in _YAML:
        runs, notes = find_runs(Path.cwd(), storage, path)
        runs = [run for run in runs if path.resolve() in {log.resolve() for log in run.logs}]
        if not runs:
            raise ConfigError("; ".join(notes) or f"{path} is no sweep file, no event log and no SQLite file; give one")
        return runs
    spec = read_sweep_file(path)
    given = storage or spec.storage
    runs, _ = find_runs(Path.cwd(), given, path)
    if given is not None:
        return _named(runs, spec.study, given)
    runs = [
        run
        for run in runs
        if run.storage is None and run.file is not None and Path(run.file).resolve() == path.resolve()
    ]
    if not runs:
        raise ConfigError(
            f"{path}: the sweep has no hydra.storage, and this folder has no event log of the sweep; run hydra-tune sweep "
            f"{path}, or give the event log"
        )
    return runs


def _named(runs: list[SweepRunRecord], name: str | None, storage: str | None) -> list[SweepRunRecord]:
    chosen = [run for run in runs if name in (None, run.name)]
    if not chosen:
        there = f"; there is {_names(runs)}" if runs else ""
        remedy = "; give a folder, a sweep file, an event log, or --storage URL" if storage is None else ""
        run = "run" if name is None else f"run {name!r}"
        raise ConfigError(f"there is no {run} in {_place(storage)}{there}{remedy}")
    return chosen


def _only(runs: list[SweepRunRecord], name: str | None, storage: str | None) -> SweepRunRecord:
    if len(runs) == 1:
        return runs[0]
    place = _place(storage)
    if name is None:
        raise ConfigError(f"there are {len(runs)} runs in {place}: {_names(runs)}; give the name of one")
    raise ConfigError(f"there are {len(runs)} runs {name!r} in {place}; give the event log of one, or --storage URL")


def _place(storage: str | None) -> str:
    return "this folder" if storage is None else masked(storage)


def _names(runs: list[SweepRunRecord]) -> str:
    return ", ".join(repr(known) for known in sorted({run.name for run in runs}))


def kept_study(run: SweepRunRecord) -> tuple[str, str]:
    """Return storage and study of a run.

    Raises:
        ConfigError: the study was in memory.
    """
    if run.study is None or run.storage is None:
        raise ConfigError(
            f"the study of {run.name!r} was in memory, and is gone, but for kept weights, whose files the sweep's last lines "
            "have named; give the sweep a hydra.storage"
        )
    return run.storage, run.study


def absolute_storage(url: str, folder: Path) -> str:
    """Make the path in the URL of a storage file absolute; other URLs stay as they are."""
    parts = STORAGE_FILE.fullmatch(url)
    if parts is None:
        return url
    prefix, path, options = parts.groups()
    return f"{prefix}{(folder.resolve() / path)}{options}"


def _paths(folder: Path, patterns: Iterable[str], also: Path | None) -> list[Path]:
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
    suffixes = {Path(pattern).suffix for pattern in patterns}
    if also is not None and also.suffix in suffixes and also.resolve() not in {path.resolve() for path in paths}:
        paths.append(also)
    return paths


def _sweep_files(paths: Iterable[Path]) -> Iterator[SweepSpec]:
    for path in paths:
        try:
            yield read_sweep_file(path)
        except SweepFileError:
            continue  # another program's file, or one that has no runs as long as it is wrong


def _read_log(path: Path, notes: list[str]) -> RunState | None:
    try:
        return read_run_state(path)
    except ConfigError as error:
        notes.append(str(error))
        return None


def _storages(folder: Path, specs: Iterable[SweepSpec], logs: Iterable[RunState]) -> list[str]:
    """URLs of storages, each once: those of sweep files, logs and SQLite files, but none whose password is masked."""
    urls = [absolute_storage(spec.storage, folder) for spec in specs if spec.storage is not None]
    noted = [(log.sweep["storage"], Path(log.sweep["folder"])) for log in logs if log.sweep.get("storage")]
    urls += [absolute_storage(url, place) for url, place in noted]
    urls += [
        absolute_storage(f"sqlite:///{path}", Path.cwd()) for path in sorted(folder.iterdir()) if _is_database(path)
    ]
    by_place: dict[str, str] = {}
    for url in urls:
        by_place.setdefault(masked(url), url)
    # A log has no password, and without a sweep file nobody here knows the password.
    return [url for url in by_place.values() if "***" not in url]


def _is_database(path: Path) -> bool:
    """Whether a file is an SQLite database with Optuna's tables; True for a locked file."""
    if path.suffix not in _DATABASES or not path.is_file():
        return False
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
            names = {name for (name,) in connection.execute("select name from sqlite_master")}
            return {"studies", "trials", "version_info"} <= names
    except sqlite3.OperationalError:  # locked just now: the reader waits longer
        return True
    except sqlite3.DatabaseError:
        return False


def _studies(urls: Iterable[str], notes: list[str], *, is_given: bool) -> dict[tuple[str, str], _RunParts]:
    parts: dict[tuple[str, str], _RunParts] = {}
    for url in urls:
        parts_of_url = STORAGE_FILE.fullmatch(url)
        # The storage of a sweep that has not run yet.
        if not is_given and parts_of_url is not None and not Path(parts_of_url[2]).is_file():
            continue
        try:
            records = study_reader().read(url)
        except ConfigError as error:
            if is_given:
                raise
            notes.append(masked(str(error)))
            continue
        parts |= {(masked(url), record.name): _RunParts(record=record, storage=url) for record in records}
    return parts


def _key_of(log: RunState) -> tuple[str, str]:
    """Key of a log's run: storage and study, or the log itself where the study is in memory."""
    facts = log.sweep
    if not facts.get("storage"):
        return "", str(log.path)
    return masked(absolute_storage(facts["storage"], Path(facts["folder"]))), facts["study"]


def _is_of_study(log: RunState, part: _RunParts) -> bool:
    """Whether a log is of this study, and not of a deleted one with the same name."""
    started_at = None if part.record is None else part.record.started_at
    return started_at is None or log.started_at.timestamp() >= started_at.timestamp() - _CLOCK_SECONDS


def _is_locked(lock: Path) -> bool:
    """Whether a process runs the sweep of a folder, as far as this user may know."""
    # Another user's lock cannot be opened; the log tells of a running sweep, too.
    with suppress(PermissionError):
        return is_locked(lock)
    return False


def _record(part: _RunParts, folder: Path) -> SweepRunRecord:
    logs = sorted(part.logs, key=lambda log: log.started_at)
    log = logs[-1] if logs else None
    facts = {} if log is None else log.sweep
    spec, record = part.spec, part.record
    study = record.name if record is not None else facts.get("study") if facts.get("storage") else None
    lock = None if study is None else _sweep_folder(part, facts, study, folder)
    is_alive = (log is not None and log.is_alive and not log.is_ended) or (lock is not None and _is_locked(lock))
    trials = _trials(part, logs)
    planned = facts.get("planned") or (None if spec is None else _planned(spec))
    phase = phase_of(trials, log, planned=planned, is_alive=is_alive, has_folder=lock is not None)
    if not is_alive and phase != "unclear":
        trials = tuple(
            replace(trial, state=LEFT) if trial.state in UNDER_WAY - {"waiting"} else trial for trial in trials
        )
    goals = record.goals if record is not None else (facts["goal"],) if facts else ()
    log_name = None if log is None else facts.get("name") or log.path.stem
    run = SweepRunRecord(
        name=study or log_name or "run",
        phase=phase,
        trials=trials,
        goals=goals,
        best=None if record is None else record.best,
        metric=facts.get("metric") or (None if spec is None else spec.metric),
        planned=planned,
        study=study,
        storage=part.storage or facts.get("storage"),
        logs=tuple(log.path for log in logs),
        file=None
        if spec is None and not facts
        else str(spec.file if spec is not None else Path(facts["folder"], facts["file"])),
        weights_dir=None if spec is None else spec.weights_dir,
        started_at=log.started_at if log is not None else record.started_at if record is not None else None,
    )
    return replace(run, next_step=_next_step(run, part, facts))


def _sweep_folder(part: _RunParts, facts: Mapping[str, Any], study: str, searched: Path) -> Path | None:
    """Folder of the sweep, whose lock a running sweep holds; None without checkpoints, or before the first of them."""
    # Without a log, a path in a sweep file counts from the searched folder, as that of the storage does (`find_runs`), or
    # from the working folder, where the sweep of a file in another folder was begun.
    folders = [Path(facts["folder"])] if facts else [searched, Path.cwd()]
    name = facts.get("checkpoint_dir") or (None if part.spec is None else part.spec.checkpoint_dir)
    paths = [] if name is None else [sweep_path(folder / name, study) for folder in folders]
    return next((path for path in paths if path.is_dir()), None)


def _trials(part: _RunParts, logs: list[RunState]) -> tuple[TrialView, ...]:
    if part.record is None:
        return tuple(sorted(logs[-1].trials.values(), key=lambda trial: trial.number))
    logged = _logged(logs)
    trials = []
    for stored in part.record.trials:
        view = logged.get(stored.number, stored)
        trial = replace(stored, epochs=view.epochs, error=stored.error or view.error)
        if stored.state in UNDER_WAY and view.step > stored.step:
            # A process that was ended had logged a report before the storage heard of the report.
            trials.append(replace(trial, value=view.value, step=view.step, metrics=view.metrics))
        else:
            trials.append(replace(trial, metrics={**view.metrics, **stored.metrics}))
    return tuple(trials)


def _logged(logs: Iterable[RunState]) -> dict[int, TrialView]:
    """Last word of the logs, the oldest first, on each trial; a log without a report of a trial leaves earlier reports."""
    logged: dict[int, TrialView] = {}
    for view in (view for log in logs for view in log.trials.values()):
        # A job with a name of its own, such as the recovery of weights, has no trial's number.
        if view.name is not None:
            continue
        earlier = logged.get(view.number)
        if earlier is not None and not view.metrics:
            view = replace(view, value=earlier.value, step=earlier.step, metrics=earlier.metrics)  # noqa: PLW2901
        logged[view.number] = view
    return logged


def _planned(spec: SweepSpec) -> int | None:
    if spec.run_cap is None and spec.method == "grid":
        return grid_size(spec.parameters or {})
    return spec.run_cap


def _next_step(run: SweepRunRecord, part: _RunParts, facts: Mapping[str, Any]) -> str | None:
    if run.phase == "unclear":
        return "trials are running in the storage, and no event log or lock here says whether their process lives"
    if run.phase not in ("killed", "interrupted") or (not facts and part.spec is None):
        return None
    command = facts.get("command") or f"hydra-tune sweep {shlex.quote(run.file or '')}"
    if facts and Path(facts["folder"]) != Path.cwd():
        command = f"cd {shlex.quote(facts['folder'])} && {command}"
    saves = facts.get("checkpoint_dir") or (part.spec is not None and part.spec.checkpoint_dir)
    is_named = facts.get("is_named", part.spec is not None and part.spec.study is not None)
    return how_to_go_on(command, is_kept=run.storage is not None and bool(is_named), saves=bool(saves))
