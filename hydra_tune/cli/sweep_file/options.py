"""Options of the command line, and their merge with the sweep file.

`cli/commands/sweep.py` merges the options into the `SweepSpec` right after the file is read, and asks `check_saving`,
as does `cli/dry_run/checking.py`. `DisplayOptions` go on to the run and its output (`cli/display/output.py`), and to
`cli/display/isolation.py`; `cli/dry_run/checking.py` and `cli/dry_run/planning.py` make their own. An overridden key of
`hydra:` loses its place in the file, so that an error does not blame the file. The module must not know tuners or load
torch.
"""

from dataclasses import dataclass, replace
from typing import Any

from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.errors import SweepFileError


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFileOverrides:
    """Options that override the file's, as of `SweepSpec` and `HydraExecutor`; None where not given.

    No trial starts later than `timeout_seconds`, which a file cannot give.
    """

    devices: str | None = None
    device_memory: str | None = None
    max_concurrent: int | None = None
    admission: str | None = None
    policy: str | None = None
    fusion: str | None = None
    event_log_limit: str | None = None
    run_cap: int | None = None
    timeout_seconds: float | None = None
    storage: str | None = None
    checkpoint_dir: str | None = None
    checkpoint_every: str | int | None = None
    stop_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DisplayOptions:
    """The user's choice of display.

    Args:
        as_json: one JSON object on standard output, and nothing else.
        live: the live view, if standard output is a terminal.
        command: the command that goes on with the sweep, for people to copy; None where not known.
    """

    as_json: bool = False
    live: bool = True
    command: str | None = None


def with_overrides(spec: SweepSpec, overrides: SweepFileOverrides) -> SweepSpec:
    """Apply the command line's options to a file's sweep; return the sweep to run.

    Raises:
        SweepFileError: neither file nor options say when the sweep ends.
    """
    engine = dict(spec.engine)
    places = dict(spec.places)
    changes: dict[str, Any] = {}
    # Arguments of the executor, and fields of the sweep.
    for target, names in (
        (engine, ("devices", "device_memory", "max_concurrent", "admission", "policy", "fusion", "event_log_limit")),
        (changes, ("storage", "checkpoint_dir", "checkpoint_every", "stop_seconds")),
    ):
        for name in names:
            value = getattr(overrides, name)
            if value is not None:
                target[name] = value
                # An error about this value belongs to the command line, not to the file.
                places.pop(f"hydra.{name}", None)
    if overrides.fusion == "off":
        # The file's settings of fusion would be refused, as they have no effect.
        engine = {name: value for name, value in engine.items() if not name.startswith("fusion_")}
    spec = replace(spec, engine=engine, places=places, run_cap=overrides.run_cap or spec.run_cap, **changes)
    # A grid ends by itself.
    if spec.run_cap is None and overrides.timeout_seconds is None and spec.method != "grid":
        raise SweepFileError(
            f"{spec.file}:1:1: run_cap is missing, so the sweep would never end; add run_cap: 20, or give --run-cap or "
            f"--timeout"
        )
    return spec


def check_saving(spec: SweepSpec, *, resume: bool) -> None:
    """Refuse a sweep whose checkpoints could never be found again, given the command line's options.

    Raises:
        SweepFileError: a required folder, storage or name is missing.
    """
    # A study in memory, or without a name, is gone with its process, and the checkpoints of its trials with it.
    missing = [
        name for name, value in (("hydra.storage", spec.storage), ("name, or hydra.study", spec.study)) if value is None
    ]
    if spec.checkpoint_dir is None:
        if spec.checkpoint_every is not None:
            raise SweepFileError(
                f"{spec.at('hydra.checkpoint_every')}: needs a folder for checkpoints; add checkpoint_dir"
            )
        if resume:
            also = f"; the study needs {' and '.join(missing)} as well" if missing else ""
            raise SweepFileError(
                f"--resume: {spec.file} has no checkpoint_dir in hydra:, and trials that were interrupted go on from their "
                f"checkpoints; add checkpoint_dir, or give --checkpoint-dir{also}"
            )
        return
    if missing:
        raise SweepFileError(
            f"{spec.at('hydra.checkpoint_dir')}: trials go on from checkpoints under the numbers that a study has noted, "
            f"which has to be kept under a name; add {' and '.join(missing)}"
        )
