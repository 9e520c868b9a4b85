"""Checks of the options of `HydraExecutor`; every error names the option.

`ExecutorSettings` (`settings.py`) runs the checks when a `HydraExecutor` is made, before any device is opened; only
`check_compiler_acts` waits for the devices, in `ExecutorSettings.open_pool`. `HydraExecutor` (`hydra_tune/executor.py`)
checks its own arguments with `check_count`, `check_flag` and `members_of_group`. The module must not open a device or a
folder.
"""

from collections.abc import Sequence

import torch

from hydra_tune.devices.device import Device
from hydra_tune.devices.hardware.discovery import parse_bandwidth
from hydra_tune.errors import ConfigError, with_hint
from hydra_tune.fusion.compile.batched_plan_cache import CUDA_GRAPHS
from hydra_tune.quantities import parse_bytes

_PLACEMENTS = ("device", "host", "auto")
_NAMED_CUTS = ("layer", "tuned")
_FUSION_DEFAULTS = {"fusion_size": 16, "fusion_compile": None, "fusion_planner": "auto"}


def members_of_group(fusion: object, most: object) -> int:
    """Return the largest number of trials in a group by the executor's options; 0 without fusion.

    Raises:
        ConfigError: an option is invalid; the error names the option.
    """
    if fusion not in ("off", "on", "auto"):
        raise ConfigError(f"fusion must be 'off', 'on' or 'auto', not {fusion!r}")
    if isinstance(most, bool) or not isinstance(most, int) or most < 2:  # noqa: PLR2004 - a group
        raise ConfigError(f"fusion_size must be a whole number of at least 2, not {most!r}")
    return 0 if fusion == "off" else most


def check_fusion_acts(fusion: object, **options: object) -> None:
    """Refuse an option of fusion that does nothing, because nothing is fused.

    Raises:
        ConfigError: an option has another value than the executor's default.
    """
    for name, value in options.items():
        if fusion == "off" and value != _FUSION_DEFAULTS[name]:
            raise ConfigError(
                f"{name}={value!r} does nothing with fusion='off'; give fusion='auto' or 'on', or leave {name} out"
            )


def check_compiler_acts(backend: str | None, devices: Sequence[Device]) -> None:
    """Refuse a `fusion_compile` that no device of the pool uses.

    Raises:
        ConfigError: CUDA graphs where all devices are CPU devices, or a compiler where all devices are GPUs.
    """
    if backend is None:
        return
    if backend == CUDA_GRAPHS and all(device.is_host for device in devices):
        raise ConfigError(
            f"fusion_compile={backend!r} records steps on GPUs, and all devices of this pool are CPU devices; leave "
            "fusion_compile out, or give a compiler for CPUs, such as 'inductor'"
        )
    if backend != CUDA_GRAPHS and not any(device.is_host for device in devices):
        raise ConfigError(
            f"fusion_compile={backend!r} compiles steps for CPU devices, and all devices of this pool are GPUs; leave "
            f"fusion_compile out, or give {CUDA_GRAPHS!r}"
        )


def check_planner(planner: object) -> None:
    """Refuse an invalid value of `fusion_planner`.

    Raises:
        ConfigError: the option is invalid.
    """
    if planner not in ("off", "on", "auto"):
        raise ConfigError(f"fusion_planner must be 'off', 'on' or 'auto', not {planner!r}")


def checked_backend(name: str, backend: str | None) -> str | None:
    """Check and return the name of a backend of `torch.compile`, or None.

    Raises:
        ConfigError: torch has no such backend.
    """
    if backend is None:
        return None
    backends = torch.compiler.list_backends(exclude_tags=())
    if backend not in backends:
        raise ConfigError(f"{name} must be None or a backend of torch.compile ({', '.join(backends)}), not {backend!r}")
    return backend


def check_count(name: str, value: object) -> None:
    """Refuse anything but None or a whole number of at least 1."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")


def check_flag(name: str, value: object) -> None:
    """Refuse anything but true and false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r}")


def check_counts(max_concurrent: object, num_shards: object) -> None:
    """Refuse invalid numbers of trials and of shards."""
    check_count("max_concurrent", max_concurrent)
    if not isinstance(num_shards, str):
        check_count("num_shards", num_shards)
    elif num_shards not in _NAMED_CUTS:
        expected = "num_shards must be a whole number of at least 1, 'layer' or 'tuned'"
        raise ConfigError(with_hint(f"{expected}, not {num_shards!r}", num_shards, _NAMED_CUTS))


def check_memory(device_memory: str | int | None, link_bandwidth: str | int | None) -> None:
    """Refuse an invalid size of memory, or an invalid bandwidth."""
    if device_memory is not None:
        parse_bytes(device_memory, what="device_memory")
    parse_bandwidth(link_bandwidth)


def check_placement(placement: str, spill_dir: object) -> None:
    """Refuse an invalid placement of updates, or a placement that conflicts with `spill_dir`."""
    if placement not in _PLACEMENTS:
        raise ConfigError(f"optimizer_placement must be 'device', 'host' or 'auto', not {placement!r}")
    if placement != "device" and spill_dir is not None:
        verb = "keeps" if placement == "host" else "may keep"
        raise ConfigError(
            f"optimizer_placement={placement!r} {verb} optimizer state in host memory, and spill_dir moves host memory to "
            "disk; give one of the two"
        )
