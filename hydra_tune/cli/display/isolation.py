"""Decides whether a sweep runs in a separate process under a supervisor, and reports crashes of the process.

`cli/commands/sweep.py` asks `isolates` before a sweep begins, and gives `tell_crash` to the supervisor, for each crash;
`output.py` shares `TERMINAL_BACK`. Both functions run in the process that supervises an isolated sweep, so the module must
start no thread and import no torch.
"""

import os
import sys

from hydra_tune.cli.sweep_file.options import DisplayOptions
from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.errors import ConfigError
from hydra_tune.supervision.supervisor import why_not_here

TERMINAL_BACK = b"\x1b[?25h\x1b[?1049l"
"""Escape codes that show the cursor and switch to the first screen, as `AlternateScreen.close` does."""


def isolates(spec: SweepSpec, wanted: bool | None, *, is_on_cluster: bool) -> bool:
    """Return whether a sweep, with the command line's options, runs in a process of its own.

    With `wanted` None, a sweep does so wherever possible.

    Raises:
        ConfigError: isolation is requested but not possible.
    """
    if wanted is False:
        return False
    # Reasons that the user's options give replace the reason of this machine, because the user can change the options.
    why_not = why_not_here()
    if is_on_cluster:
        why_not = "not for sweeps on a Ray cluster; leave it out, or leave out --ray"
    elif spec.checkpoint_dir is None:
        why_not = (
            "trials go on from their checkpoints after a crash, and this sweep has none; add checkpoint_dir, or give "
            "--checkpoint-dir"
        )
    elif spec.engine.get("fusion", "off") != "off":
        why_not = (
            "trials that are computed together crash together, so the trial at fault is unknown; give --fusion off"
        )
    if why_not is not None and wanted:
        raise ConfigError(f"--isolate: {why_not}")
    return why_not is None


def tell_crash(display: DisplayOptions, text: str) -> None:
    """Report a crash of the sweep's process on standard error, and restore the terminal that the process has left."""
    if display.live and not display.as_json and sys.stdout.isatty():
        # The crashed process had no chance to do so itself.
        os.write(sys.stdout.fileno(), TERMINAL_BACK)
    print(f"warning: {text}", file=sys.stderr, flush=True)  # noqa: T201 - it is output
