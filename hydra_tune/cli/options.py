"""What the command line says besides the sweep file, and how the two are joined."""

from dataclasses import dataclass, replace

from hydra_tune.cli.spec import SweepSpec
from hydra_tune.errors import SweepFileError


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Options that go before the file's; None where they were not given.

    Args:
        devices: names of devices.
        device_memory: size of the budget of each device.
        max_concurrent: trials in flight.
        admission: which of them go first.
        policy: how shard units are chosen.
        run_cap: trials of the whole study.
        timeout_seconds: no trial starts later.
        storage: where the study is kept.
    """

    devices: str | None = None
    device_memory: str | None = None
    max_concurrent: int | None = None
    admission: str | None = None
    policy: str | None = None
    run_cap: int | None = None
    timeout_seconds: float | None = None
    storage: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """How a sweep is shown.

    Args:
        as_json: one JSON object on standard output, and nothing else.
        live: the live view, if standard output is a terminal.
    """

    as_json: bool = False
    live: bool = True


def with_overrides(spec: SweepSpec, overrides: Overrides) -> SweepSpec:
    """The sweep with the command line's options in place of the file's.

    Args:
        spec: the file's sweep.
        overrides: the options.

    Returns:
        The sweep to run.

    Raises:
        SweepFileError: neither says when the sweep ends.
    """
    engine = dict(spec.engine)
    places = dict(spec.places)
    for name in ("devices", "device_memory", "max_concurrent", "admission", "policy"):
        value = getattr(overrides, name)
        if value is not None:
            engine[name] = value
            # An error about this value is not an error of the file.
            places.pop(f"hydra.{name}", None)
    if overrides.storage is not None:
        places.pop("hydra.storage", None)
    spec = replace(
        spec,
        engine=engine,
        places=places,
        run_cap=overrides.run_cap or spec.run_cap,
        storage=overrides.storage or spec.storage,
    )
    if spec.run_cap is None and overrides.timeout_seconds is None and spec.method != "grid":
        raise SweepFileError(
            f"{spec.file}:1:1: run_cap is missing, so the sweep would never end; add run_cap: 20, or give --run-cap or "
            f"--timeout"
        )
    return spec
