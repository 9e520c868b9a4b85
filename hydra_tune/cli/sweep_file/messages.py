"""Converts pydantic's errors to the terms of a sweep file.

`reader.py` and `overrides.py` convert an error when pydantic has refused a value, and the models (`sweep_model.py`)
describe refused values in errors of their own. `reader.py` adds the place of the error; the module knows no places. The
module must not know tuners or load torch.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from hydra_tune.errors import did_you_mean

_KINDS: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "dict_type": "a map",
    "model_type": "a map",
    "model_attributes_type": "a map",
    "list_type": "a list",
}
_LIMITS: Mapping[str, tuple[str, str]] = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}


def describe(value: Any) -> str:
    """Describe a value for a message: `'ten'`, `3`, `true`, `a map`."""
    if isinstance(value, dict):
        return "a map"
    if isinstance(value, list):
        return "a list"
    # Looked up only for None and booleans, because 1 == True would match as a key.
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)


def as_written(value: Any) -> str:
    """Format a value as written in a sweep file, lists and maps included."""
    # On one line, however long; a scalar by itself ends with YAML's mark of a document's end.
    text: str = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


def message(detail: Mapping[str, Any]) -> str:
    """Convert an entry of pydantic's `ValidationError.errors()` to a text, without the place."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}, not {describe(detail['input'])}"
    if kind in _LIMITS:
        sign, limit = _LIMITS[kind]
        return f"must be {sign} {context[limit]}, not {describe(detail['input'])}"
    special = _SPECIAL.get(kind)
    return special(detail) if special else str(detail["msg"])


def _one_of(expected: str, got: Any) -> str:
    # pydantic gives the allowed values as a text: "'bayes', 'random' or 'grid'".
    allowed_words = [word.strip(" '") for word in expected.replace(" or ", ", ").split(",")]
    hint = did_you_mean(got, allowed_words) if isinstance(got, str) else ""
    return f"must be one of {', '.join(allowed_words)}, not {describe(got)}{f'; {hint}' if hint else ''}"


_SPECIAL: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "literal_error": lambda detail: _one_of(detail["ctx"]["expected"], detail["input"]),
    "union_tag_invalid": lambda detail: "type " + _one_of(detail["ctx"]["expected_tags"], detail["ctx"]["tag"]),
    "union_tag_not_found": lambda _: "needs a type: hyperband, successive_halving or median",
    "string_too_short": lambda _: "must not be empty",
    "too_short": lambda _: "must not be empty",
}
