"""Reads and draws studies for the command line: the entry point `optuna` of the group `hydra_tune.studies`.

The module must not create a storage or a study. `plot` writes a picture to a file. `hydra-tune list`, `status`, `show`,
`best`, `plot` and `export` (`hydra_tune/cli/inspect/run_scan.py`) call `read`, `hydra-tune sweep` and `check` call `check`,
and `hydra-tune plot` and `export` call `plot`. `find_weights` (`finding.py`) calls `stored_study` for `best` and `export`,
and `sweep.py` takes `GIVEN` and `given_params`. Only `check` imports torch, so that `hydra-tune list` answers at once.
"""

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hydra_tune.cli.display.next_step import masked
from hydra_tune.cli.inspect.study_record import StudyRecord
from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.errors import ConfigError, message_line
from hydra_tune.observe.live.snapshot import Goal, TrialView
from hydra_tune_optuna import optuna_internals
from hydra_tune_optuna.storage_opening import check_file, has_tables, open_storage

_STATES = {
    TrialState.COMPLETE: "completed",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}
_PICTURES = {
    "learning curves": "plot_intermediate_values",
    "parallel coordinates": "plot_parallel_coordinate",
    "importances": "plot_param_importances",
}
GIVEN = "hydra_tune:given:"
"""Prefix of a trial's system attributes with values that `suggest` (`sweep.py`) rounded for the task, by parameter."""
_INCHES, _DOTS = (11, 5), 100


class OptunaStudyReader:
    """A `StudyReader` for Optuna's storages, whichever program has made the study."""

    def read(self, storage: str) -> tuple[StudyRecord, ...]:
        """Read all studies of a storage, by name."""
        with _reading(storage):
            opened = open_storage(storage)
            assert opened is not None
            names = sorted(optuna.get_all_study_names(opened))
            return tuple(_record(optuna.load_study(study_name=name, storage=opened)) for name in names)

    def check(self, spec: SweepSpec, *, resume: bool) -> tuple[int, int | None]:
        """Refuse a sweep that cannot begin; see `check_sweep`."""
        from hydra_tune_optuna.sweep import check_sweep  # noqa: PLC0415 - its module imports torch

        return check_sweep(spec, resume=resume)

    def plot(self, storage: str, study: str, path: Path) -> tuple[str, ...]:
        """Draw a study with Optuna's own plots, one below the other; return the reasons for missing plots.

        Raises:
            ConfigError: the study cannot be read, a package for plots is missing, or there is nothing to draw.
        """
        loaded = stored_study(storage, study)
        as_html = path.suffix.lower() == ".html"
        pictures, missing = [], []
        draw = _html if as_html else _pixels
        plots = _plotly() if as_html else _matplotlib()
        for name, function in _PICTURES.items():
            try:
                _check_has_points(loaded, name)
                options = {} if name == "learning curves" else {"params": _varying(loaded)}
                pictures.append(draw(partial(getattr(plots, function), **options), loaded))
            except (ValueError, RuntimeError, ImportError) as error:
                missing.append(f"no {name}: {message_line(error)}")
        if not pictures:
            raise ConfigError(f"study {study!r} has nothing to draw: {'; '.join(missing)}")
        if as_html:
            path.write_text("\n".join(pictures), encoding="utf-8")
        else:
            _save(pictures, path)
        return tuple(missing)


def stored_study(storage: str, name: str) -> Study:
    """Load a study.

    Raises:
        ConfigError: the storage or the study does not exist, or cannot be read.
    """
    with _reading(storage):
        opened = open_storage(storage)
        assert opened is not None
        return optuna.load_study(study_name=name, storage=opened)


def given_params(trial: FrozenTrial) -> dict[str, Any]:
    """Parameters as the task was given them, whatever a sweep file says now; the study has them as drawn."""
    return {name: trial.system_attrs.get(GIVEN + name, drawn) for name, drawn in trial.params.items()}


@contextmanager
def _reading(storage: str) -> Iterator[None]:
    """Silence Optuna's own lines below errors, and name the storage in errors of reading."""
    check_file(storage)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        _check_tables(storage)
        yield
    except Exception as error:
        raise ConfigError(masked(f"the storage {storage!r} cannot be read: {message_line(error)}")) from error
    finally:
        optuna.logging.set_verbosity(verbosity)


def _check_tables(storage: str) -> None:
    """Refuse the empty database of a server, in which Optuna would create its tables."""
    if not has_tables(storage):
        message = "there are no tables of Optuna"
        raise ValueError(message)


def _record(study: Study) -> StudyRecord:
    trials = study.get_trials(deepcopy=False)
    has_completed = any(trial.state == TrialState.COMPLETE for trial in trials)
    best: list[FrozenTrial] = []
    with suppress(ValueError):  # no trial that fulfils its constraints
        if has_completed:
            # Among equal trials, weights are kept of the study's own choice.
            best = study.best_trials if len(study.directions) > 1 else [study.best_trial]
    starts = [trial.datetime_start for trial in trials if trial.datetime_start is not None]
    return StudyRecord(
        name=study.study_name,
        goals=tuple(_goal(direction) for direction in study.directions),
        trials=tuple(map(_view, trials)),
        best=tuple(trial.number for trial in best),
        started_at=min(starts, default=None),
    )


def _goal(direction: StudyDirection) -> Goal:
    return "maximize" if direction == StudyDirection.MAXIMIZE else "minimize"


def _view(trial: FrozenTrial) -> TrialView:
    step = trial.last_step
    value = trial.intermediate_values[step] if step is not None else None
    metrics: dict[str, Any] = {
        name: noted for name, noted in trial.user_attrs.items() if isinstance(noted, int | float)
    }
    if trial.values is not None and len(trial.values) > 1:
        metrics |= {f"value_{number}": value for number, value in enumerate(trial.values)}
    elif trial.values is not None:
        value = trial.values[0]
    return TrialView(
        number=trial.number,
        state=_STATES[trial.state],
        params=given_params(trial),
        value=value,
        step=0 if step is None else step,
        metrics=metrics,
        error=trial.system_attrs.get("fail_reason"),
        is_feasible=not optuna_internals.violates_constraints(trial),
    )


def _check_has_points(study: Study, name: str) -> None:
    """Refuse an empty picture, for which Optuna's plots only log a warning."""
    trials = study.get_trials(deepcopy=False)
    if name == "learning curves" and not any(trial.intermediate_values for trial in trials):
        raise ValueError("no trial has reported values along the way")
    if len(study.directions) > 1:
        raise ValueError("the study has several objectives")
    if name != "learning curves" and _varying(study) == []:
        raise ValueError("no trial with parameters that vary has completed")


def _varying(study: Study) -> list[str] | None:
    """Names of the parameters not fixed to a single value; None if no parameter is fixed: Optuna then takes all by itself."""
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    names = {name for trial in trials for name in trial.params}
    varying = {name for trial in trials for name, kept in trial.distributions.items() if not kept.single()}
    return None if names and varying == names else sorted(varying)


def _matplotlib() -> Any:
    try:
        import matplotlib as mpl  # noqa: PLC0415 - takes half a second, for one command
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib; install it with: pip install matplotlib") from error
    mpl.use("agg")  # no display
    return optuna.visualization.matplotlib


def _plotly() -> Any:
    if not optuna.visualization.is_available():
        raise ConfigError(
            "a plot in HTML needs plotly; install it with: pip install 'hydra-tune[html]', or give a .png file"
        )
    return optuna.visualization


def _html(plot: Callable[[Study], Any], study: Study) -> str:
    return str(plot(study).to_html(full_html=False, include_plotlyjs="cdn"))


def _pixels(plot: Callable[[Study], Any], study: Study) -> Any:
    from matplotlib import pyplot as plt  # noqa: PLC0415 - as above; Optuna's plots use it, too

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna's plots are experimental
        figure = plot(study).figure
    try:
        figure.set_size_inches(*_INCHES)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DOTS, bbox_inches=None)
    finally:
        plt.close(figure)
    buffer.seek(0)
    return plt.imread(buffer)


def _save(pictures: Sequence[Any], path: Path) -> None:
    import numpy as np  # noqa: PLC0415 - of matplotlib
    from matplotlib import pyplot as plt  # noqa: PLC0415 - as above

    plt.imsave(path, np.concatenate(pictures), format="png")
