"""Whether a sweep runs in a process of its own, under a supervisor, and what is shown when that process crashes."""

import os
import sys

from hydra_tune.cli.options import Display
from hydra_tune.cli.spec import SweepSpec
from hydra_tune.errors import ConfigError
from hydra_tune.supervision.supervisor import why_not_here

TERMINAL_BACK = b"\x1b[?25h\x1b[?1049l"
"""Gives the terminal back as it was: the cursor, and the first screen, as `Screen.close` has them."""


def isolates(spec: SweepSpec, wanted: bool | None, *, is_on_cluster: bool) -> bool:
    """Whether a sweep is to go on after a crash of its process.

    Args:
        spec: the sweep, with what the command line says.
        wanted: what the command line says; None: nothing, and it goes on wherever it can.
        is_on_cluster: whether it runs on a cluster.

    Raises:
        ConfigError: it is wanted, and cannot be.
    """
    if wanted is False:
        return False
    why_not = why_not_here()
    if is_on_cluster:
        why_not = "not for sweeps on a Ray cluster; leave it out, or leave out --ray"
    elif spec.checkpoint_dir is None:
        why_not = (
            "trials go on from their checkpoints after a crash, and this sweep has none; add checkpoint_dir, or give "
            "--checkpoint-dir"
        )
    elif spec.engine.get("fusion", "off") != "off":
        why_not = "trials that are computed together crash together, and nobody could say which did; give --fusion off"
    if why_not is not None and wanted:
        raise ConfigError(f"--isolate: {why_not}")
    return why_not is None


def tell_crash(display: Display, text: str) -> None:
    """Say that the sweep's process has crashed, on standard error, and give back a terminal that it has left as it was.

    Args:
        display: how the sweep is shown.
        text: what is to be said.
    """
    if display.live and not display.as_json and sys.stdout.isatty():
        os.write(sys.stdout.fileno(), TERMINAL_BACK)
    print(f"warning: {text}", file=sys.stderr, flush=True)  # noqa: T201 - it is output
