"""Loads the trained module from a result of Ray.

People import `load_module` from `hydra_tune_ray` after a search, to use the best trial's model. The module imports torch only
when `load_module` is called.
"""

from pathlib import Path
from typing import Any

from ray.tune import Checkpoint, Result

from hydra_tune.errors import CheckpointError
from hydra_tune_ray.build_adapter import Build, built
from hydra_tune_ray.checkpoint_transfer import FOLDER


def load_module(build: Build, result: Result, checkpoint: Checkpoint | None = None) -> Any:
    """Load the trained module of a trial.

    Args:
        build: the function given to `trainable`.
        result: of the trial, e.g. `tuner.fit().get_best_result()`.
        checkpoint: one of `result.best_checkpoints`; None: the trial's last.

    Returns:
        The `torch.nn.Module` on the host, in the mode set by its factory, for most models training mode.

    Raises:
        CheckpointError: Ray has no checkpoint of the trial, or the checkpoint is damaged.
        WeightsError: `build` makes another model.
    """
    from hydra_tune.train.checkpoint.weights import load_module as load_task_module  # noqa: PLC0415 - imports torch

    chosen_checkpoint = checkpoint or result.checkpoint
    if chosen_checkpoint is None or result.config is None:
        raise CheckpointError(
            "Ray has no checkpoint of this trial; give tune.CheckpointConfig(checkpoint_at_end=True), which is its default"
        )
    with chosen_checkpoint.as_directory() as folder:
        if not Path(folder, FOLDER).exists():
            raise CheckpointError(
                "Ray's checkpoint has no state of this trial, which has pruned itself (on_bad_loss='prune'); give checkpoint= "
                "one of result.best_checkpoints, which tune.CheckpointConfig(checkpoint_frequency=...) makes"
            )
        return load_task_module(built(build, result.config), f"{folder}/{FOLDER}")
