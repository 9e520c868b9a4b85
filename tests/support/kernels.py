"""Kernels that torch has on some processors only."""

import torch
from torch import nn


def has_lstm_in(precision: str) -> bool:
    """Whether torch runs an LSTM in a precision on this processor."""
    with torch.autocast("cpu", getattr(torch, precision)):
        try:
            nn.LSTM(2, 2)(torch.ones(2, 2))
        except RuntimeError:
            return False
    return True
