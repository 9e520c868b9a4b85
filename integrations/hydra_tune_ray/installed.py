"""Checks that a tested version of Ray is installed, before any import of Ray.

`__init__.py` calls `check_ray` on `import hydra_tune_ray`, and enters `check_tune` at the first use of each public name. The
module must not import Ray.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from hydra_tune_ray.errors import RayVersionError

OLDEST, NEXT = (2, 56), (2, 61)
"""The oldest tested version, and the first untested version."""

_INSTALL = "pip install 'hydra-tune[ray]'"


def check_ray() -> None:
    """Refuse a missing or untested Ray.

    Raises:
        RayVersionError: Ray is missing, or its version is older or newer than the tested ones.
    """
    try:
        installed_version = version("ray")
    except PackageNotFoundError as error:
        raise RayVersionError(f"hydra_tune_ray needs Ray, which is not installed: {_INSTALL}") from error
    if not OLDEST <= _parsed(installed_version) < NEXT:
        tested = f"{_text(OLDEST)} up to, but not including, {_text(NEXT)}"
        raise RayVersionError(
            f"Ray {installed_version} is installed, and hydra_tune_ray was tested with {tested}: {_INSTALL}"
        )


@contextmanager
def check_tune() -> Iterator[None]:
    """Within the block, turn a failed import of Ray Tune, which needs more packages than Ray alone, into a clear error.

    Raises:
        RayVersionError: a package that Ray Tune needs is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise RayVersionError(f"Ray is installed without what Tune needs ({error}): {_INSTALL}") from error


def _parsed(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))  # of 2.57rc1, 2 and 57


def _text(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))
