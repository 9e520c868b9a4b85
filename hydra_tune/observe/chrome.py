"""Events of Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

Source: "Trace Event Format", Google, 2016. Times there are microseconds.
"""

from typing import Any, Literal

COPY_TITLES = {"in": "load", "out": "spill", "across": "take over"}
"""What copies are called."""

_MICRO = 1000


def bar(title: str, row: tuple[int, int], start_ns: int, end_ns: int, what: dict[str, Any]) -> dict[str, Any]:
    """Something that took time.

    Args:
        title: shown on it.
        row: process and thread that it is shown in.
        start_ns: when it began.
        end_ns: when it ended.
        what: shown when it is chosen; its "kind" is the category.
    """
    times = {"ts": start_ns / _MICRO, "dur": (end_ns - start_ns) / _MICRO}
    return {"ph": "X", "name": title, "cat": what["kind"], "pid": row[0], "tid": row[1], **times, "args": what}


def named(what: Literal["process", "thread"], name: str, process: int, thread: int = 0) -> dict[str, Any]:
    """The name of a process or a thread, that is, of rows."""
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": thread, "args": {"name": name}}


def placed(what: Literal["process", "thread"], place: int, process: int, thread: int = 0) -> dict[str, Any]:
    """Where a process is among the others, or a thread in its process: the lowest is at the top."""
    return {"ph": "M", "name": f"{what}_sort_index", "pid": process, "tid": thread, "args": {"sort_index": place}}


def mark(
    phase: Literal["b", "n", "e"], title: str, process: int, story: int, at_ns: int, what: dict[str, Any]
) -> dict[str, Any]:
    """Part of a story, which has a row of its own: something in it begins, happens, or ends; what begins within, lies below."""
    place = {"pid": process, "tid": 0, "id": story, "ts": at_ns / _MICRO}
    return {"ph": phase, "name": title, "cat": "trial", **place, "args": what}
