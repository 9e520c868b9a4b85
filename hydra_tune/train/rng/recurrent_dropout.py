"""Dropout between the layers of recurrent modules on GPUs, whose masks cuDNN draws from a state of its own.

Torch keeps a single such state for all models on a GPU, hidden from Python. Setting the GPU's default generator makes
torch seed the state anew, by a draw from that generator, in the next recurrent module that drops values. A pool sets
the generator whenever another trial computes. So that masks do not depend on other trials, or on how many steps
a unit has, the state is seeded anew for each training batch or piece: `WholeModelRunner` (`train/loop/direct.py`) does so for
a pool, under the turn of the GPU's generator, and `train_plain` (`train/loop/reference_loop.py`) likewise. A captured unit sets
the generator anyway.
"""

import torch
from torch import nn


def drops_between_layers(module: nn.Module) -> bool:
    """Whether cuDNN draws masks for a module on a GPU."""
    return any(isinstance(each, nn.RNNBase) and each.dropout > 0 for each in module.modules())


def seed_anew(place: torch.device) -> None:
    """Let the next recurrent module on a GPU seed cuDNN's masks from the GPU's default generator."""
    torch.cuda.set_rng_state(torch.cuda.get_rng_state(place), place)
