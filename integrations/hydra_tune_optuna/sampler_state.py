"""Where a sampler's random streams are, noted with each draw, so that a search that goes on draws nothing twice.

Noted is before a draw is given out: a process that is killed at any point has either noted what somebody was given, or given
nobody what it had drawn. What else these samplers know they read from the study.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from optuna.samplers import BaseSampler

from hydra_tune_optuna import private

_DRAWING = ("before_trial", "sample_relative", "sample_independent")


def state_of(sampler: BaseSampler) -> list[dict[str, Any]]:
    """The streams as JSON can hold them, exactly."""
    return [_encoded(stream) for stream in private.random_streams(sampler)]


def restore(sampler: BaseSampler, state: list[dict[str, Any]]) -> None:
    """Have a sampler go on where another one of its kind was.

    Raises:
        ValueError: the state is not of such a sampler.
    """
    streams = private.random_streams(sampler)
    if len(streams) != len(state):
        raise ValueError(f"{type(sampler).__name__} has {len(streams)} random streams, and {len(state)} were noted")
    for stream, each in zip(streams, state, strict=True):
        try:
            stream.set_state(_decoded(each))
        except (KeyError, IndexError, TypeError, OverflowError) as error:
            raise ValueError(f"what was noted is no random stream: {error!r}") from error


def note_draws(sampler: BaseSampler, note: Callable[[list[dict[str, Any]]], None]) -> None:
    """Have `note` called with the state of a sampler after each of its draws, before anybody is given it."""
    for name in _DRAWING:
        setattr(sampler, name, _noting(sampler, getattr(sampler, name), note))


def _noting(sampler: BaseSampler, draw: Callable[..., Any], note: Callable[[list[dict[str, Any]]], None]) -> Any:
    @functools.wraps(draw)
    def drawn(*args: Any, **options: Any) -> Any:
        before = state_of(sampler)
        value = draw(*args, **options)
        after = state_of(sampler)
        if after != before:
            note(after)
        return value

    return drawn


def _encoded(stream: np.random.RandomState) -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = stream.get_state()
    return {
        "kind": kind,
        "keys": np.asarray(keys).tolist(),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "gauss": float(gauss),
    }


def _decoded(state: dict[str, Any]) -> tuple[str, Any, int, int, float]:
    keys = np.array(state["keys"], dtype=np.uint32)
    return state["kind"], keys, int(state["position"]), int(state["has_gauss"]), float(state["gauss"])
