"""Events of Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

Source: "Trace Event Format", Google, 2016. Times there are microseconds.
"""

from typing import Any, Literal

COPY_TITLES = {"in": "load", "out": "spill", "across": "take over"}
"""What copies are called."""

_MICRO = 1000
_MOST_ROWS = 1000  # of a process


def bar(title: str, row: tuple[int, int], start_ns: int, end_ns: int, what: dict[str, Any]) -> dict[str, Any]:
    """Something that took time.

    Args:
        title: shown on it.
        row: process and thread that it is shown in; threads count from 1 in each.
        start_ns: when it began.
        end_ns: when it ended.
        what: shown when it is chosen; its "kind" is the category.
    """
    times = {"ts": start_ns / _MICRO, "dur": (end_ns - start_ns) / _MICRO}
    place = {"pid": row[0], "tid": _thread(*row)}
    return {"ph": "X", "name": title, "cat": what["kind"], **place, **times, "args": what}


def named(what: Literal["process", "thread"], name: str, process: int, thread: int = 0) -> dict[str, Any]:
    """The name of a process or a thread, that is, of rows."""
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": _thread(process, thread), "args": {"name": name}}


def placed(what: Literal["process", "thread"], place: int, process: int, thread: int = 0) -> dict[str, Any]:
    """Where a process is among the others, or a thread in its process: the lowest is at the top."""
    where = {"pid": process, "tid": _thread(process, thread)}
    return {"ph": "M", "name": f"{what}_sort_index", **where, "args": {"sort_index": place}}


def mark(
    phase: Literal["b", "n", "e"], title: str, process: int, story: int, at_ns: int, what: dict[str, Any]
) -> dict[str, Any]:
    """Part of a story, which has a row of its own: something in it begins, happens, or ends; what begins within, lies below."""
    place = {"pid": process, "tid": 0, "id2": {"local": story}, "ts": at_ns / _MICRO}
    return {"ph": phase, "name": title, "cat": "trial", **place, "args": what}


def _thread(process: int, thread: int) -> int:
    """A number that no other thread and no process has: Perfetto has the thread that is named like its process go first."""
    return process * _MOST_ROWS + thread if thread else 0
