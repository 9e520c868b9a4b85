"""'Did you mean' for a name that is not known."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the closest of `known`, or nothing where none is close."""
    lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.7)
    return f"did you mean {lower[close[0]]!r}?" if close else ""
