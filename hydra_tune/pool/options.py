"""Options of `HydraExecutor` that make no sense are refused, by name."""

import torch

from hydra_tune.devices.discovery import parse_bandwidth
from hydra_tune.errors import ConfigError, with_hint
from hydra_tune.quantities import parse_bytes

_PLACEMENTS = ("device", "host", "auto")
_NAMED_CUTS = ("layer", "tuned")


def members_of_group(fusion: object, most: object) -> int:
    """How many trials a group may have by these options of the executor; 0 where there are no groups.

    Raises:
        ConfigError: by name.
    """
    if fusion not in ("off", "on", "auto"):
        raise ConfigError(f"fusion must be 'off', 'on' or 'auto', not {fusion!r}")
    if isinstance(most, bool) or not isinstance(most, int) or most < 2:  # noqa: PLR2004 - a group
        raise ConfigError(f"fusion_size must be a whole number of at least 2, not {most!r}")
    return 0 if fusion == "off" else most


def check_planner(planner: object) -> None:
    """Refuse what does not say whether steps of groups are planned.

    Raises:
        ConfigError: by name.
    """
    if planner not in ("off", "on", "auto"):
        raise ConfigError(f"fusion_planner must be 'off', 'on' or 'auto', not {planner!r}")


def checked_backend(name: str, backend: str | None) -> str | None:
    """A backend of `torch.compile`; what is none is refused."""
    if backend is None:
        return None
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(f"{name} must be None or a backend of torch.compile ({', '.join(known)}), not {backend!r}")
    return backend


def check_count(name: str, value: object) -> None:
    """Refuse what is no number of things."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r}")


def check_counts(max_concurrent: object, num_shards: object) -> None:
    """Refuse numbers of trials and of shards that are none."""
    check_count("max_concurrent", max_concurrent)
    if not isinstance(num_shards, str):
        check_count("num_shards", num_shards)
    elif num_shards not in _NAMED_CUTS:
        expected = "num_shards must be a whole number of at least 1, 'layer' or 'tuned'"
        raise ConfigError(with_hint(f"{expected}, not {num_shards!r}", num_shards, _NAMED_CUTS))


def check_memory(device_memory: str | int | None, link_bandwidth: str | int | None) -> None:
    """Refuse what is no size, or no rate."""
    if device_memory is not None:
        parse_bytes(device_memory, what="device_memory")
    parse_bandwidth(link_bandwidth)


def check_placement(placement: str, spill_dir: object) -> None:
    """Refuse a placement of updates that is none, or that does not go with the disk."""
    if placement not in _PLACEMENTS:
        raise ConfigError(f"optimizer_placement must be 'device', 'host' or 'auto', not {placement!r}")
    if placement != "device" and spill_dir is not None:
        keeps = "keeps" if placement == "host" else "may keep"
        raise ConfigError(
            f"optimizer_placement={placement!r} {keeps} optimizer state in host memory, which spill_dir is there to relieve; "
            "give one of the two"
        )
