"""Saves the state of a sampler's random streams at each draw, so that a resumed search repeats no draw.

The state is saved before a draw is handed out. All other state of these samplers comes from the study.
`keep_sampler` (`resume_sweep.py`) restores the saved state, and begins to save, when a sweep opens its study.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from optuna.samplers import BaseSampler

from hydra_tune_optuna import optuna_internals

_DRAWING = ("before_trial", "sample_relative", "sample_independent")


def state_of(sampler: BaseSampler) -> list[dict[str, Any]]:
    """Encode the random streams as JSON values, exactly."""
    return [_encoded(stream) for stream in optuna_internals.random_streams(sampler)]


def restore(sampler: BaseSampler, state: list[dict[str, Any]]) -> None:
    """Set a sampler's random streams to a saved state of the same kind of sampler.

    Raises:
        ValueError: the state belongs to another kind of sampler, or is damaged.
    """
    streams = optuna_internals.random_streams(sampler)
    if len(streams) != len(state):
        raise ValueError(f"{type(sampler).__name__} has {len(streams)} random streams, and {len(state)} were noted")
    for stream, stream_state in zip(streams, state, strict=True):
        try:
            stream.set_state(_decoded(stream_state))
        except (KeyError, IndexError, TypeError, OverflowError) as error:
            raise ValueError(f"what was noted is no random stream: {error!r}") from error


def note_draws(sampler: BaseSampler, note: Callable[[list[dict[str, Any]]], None]) -> None:
    """Call `note` with a sampler's state after each draw, before the draw is handed out."""
    for name in _DRAWING:
        # On the instance, so that other samplers of the class stay as they are.
        setattr(sampler, name, _noting(sampler, getattr(sampler, name), note))


def _noting(sampler: BaseSampler, draw: Callable[..., Any], note: Callable[[list[dict[str, Any]]], None]) -> Any:
    @functools.wraps(draw)
    def drawn(*args: Any, **options: Any) -> Any:
        before = state_of(sampler)
        value = draw(*args, **options)
        after = state_of(sampler)
        # Most calls draw nothing: do not write a file for each.
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
    # JSON has given plain ints; the generator takes words of 32 bits.
    keys = np.array(state["keys"], dtype=np.uint32)
    return state["kind"], keys, int(state["position"]), int(state["has_gauss"]), float(state["gauss"])
