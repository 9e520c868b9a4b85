"""Frequency of checkpoints, as written in programs, sweep files and on the command line.

`pool/checkpointing/writer.py` reads the text when an executor is made (`pool/runtime/settings.py`), and compares the
interval between steps of a trial; `cli/commands/sweep.py` and `cli/sweep_file/sweep_model.py` check the text before a sweep
begins. The module must not import torch, because `cli/root.py` imports both.
"""

import contextlib
from dataclasses import dataclass

from hydra_tune.errors import ConfigError
from hydra_tune.quantities import parse_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInterval:
    """Frequency of checkpoints of a trial beside its reports: one of the attributes is set, or neither."""

    steps: int | None = None
    seconds: float | None = None


def parse_every(text: object) -> CheckpointInterval:
    """Read `checkpoint_every`: None, a number of optimizer steps, or a time such as "30s", "5min" or "1h".

    Raises:
        ConfigError: the value has none of these forms.
    """
    if text is None:
        return CheckpointInterval()
    # A bool is an int in Python, and no number of steps.
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return CheckpointInterval(steps=text)
    if isinstance(text, str):
        with contextlib.suppress(ConfigError):
            return CheckpointInterval(seconds=parse_seconds(text, what="checkpoint_every"))
    raise ConfigError(
        f"checkpoint_every must be a number of optimizer steps, or a time such as '30s', '5min' or '1h', not {text!r}"
    )
