"""A `LightningModule` in a shared pool: `task_from_lightning(make_module, ...)` describes its training as a `TrainTask`.

The pool reproduces the numbers of `Trainer.fit()` on a CPU to the last bit, also for a model cut into shards. The package
refuses a module that the pool would not train exactly, with reasons and remedies. `save_checkpoint` writes a trained
module to a file.

The package must not know shards or devices. Read `task` first, which maps each part of a training to an argument of the
task, then `step` and `trainer_stand_in`, and `refusals`.
"""

from hydra_tune_lightning.errors import RefusedModuleError
from hydra_tune_lightning.task import save_checkpoint, task_from_lightning

__all__ = ["RefusedModuleError", "save_checkpoint", "task_from_lightning"]
