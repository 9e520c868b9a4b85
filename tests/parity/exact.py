"""Equality to the last bit, and where two results first differ."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def differences(expected: Any, actual: Any, path: str = "") -> Iterator[str]:
    """Yield one line per leaf that is not the same, bit for bit; tensors, floats, and containers of them."""
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        yield from _tensors(expected, actual, path)
    elif isinstance(expected, Mapping) and isinstance(actual, Mapping):
        if expected.keys() != actual.keys():
            yield f"{path}: keys {list(expected)} != {list(actual)}"
        for key in expected.keys() & actual.keys():
            yield from differences(expected[key], actual[key], f"{path}.{key}")
    elif isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        yield from differences(dict(enumerate(expected)), dict(enumerate(actual)), path)
    elif isinstance(expected, float) and isinstance(actual, float):
        if expected.hex() != actual.hex():
            yield f"{path}: {expected!r} != {actual!r}"
    elif type(expected) is not type(actual) or expected != actual:
        yield f"{path}: {expected!r} != {actual!r}"


def _tensors(expected: Tensor, actual: Tensor, path: str) -> Iterator[str]:
    expected, actual = expected.detach().cpu(), actual.detach().cpu()
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        yield f"{path}: {expected.dtype} {tuple(expected.shape)} != {actual.dtype} {tuple(actual.shape)}"
    elif not torch.equal(_bits(expected), _bits(actual)):
        yield f"{path}: differs by up to {(expected.double() - actual.double()).abs().max().item():.3g}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def without_seconds(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """A history without the one thing that is never the same."""
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in history]
