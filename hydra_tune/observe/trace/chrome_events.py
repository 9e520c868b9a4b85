"""Events of Chrome's trace format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Source: "Trace Event Format", Google, 2016. Times in the format are microseconds.

`chrome_trace.py` makes events here when `hydra-tune trace` writes a trace; `simulate/recorded/recording.py` does so
when the recording of a pool is written as a trace. The module must not know logs or recordings.
"""

from typing import Any, Literal

COPY_TITLES = {"in": "load", "out": "spill", "across": "take over"}
"""Titles of copies in the trace."""

_MICRO = 1000
_MOST_ROWS = 1000  # rows of one process, so that thread numbers never meet


def bar(title: str, row: tuple[int, int], start_ns: int, end_ns: int, what: dict[str, Any]) -> dict[str, Any]:
    """Make a bar, an event with a duration, in a row: a process, and a thread counted from 1 in the process.

    `what` has the details of the selected bar; its "kind" is the category.
    """
    times = {"ts": start_ns / _MICRO, "dur": (end_ns - start_ns) / _MICRO}
    place = {"pid": row[0], "tid": _thread(*row)}
    return {"ph": "X", "name": title, "cat": what["kind"], **place, **times, "args": what}


def named(what: Literal["process", "thread"], name: str, process: int, thread: int = 0) -> dict[str, Any]:
    """Name a process or a thread, shown as a group of rows or a row."""
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": _thread(process, thread), "args": {"name": name}}


def placed(what: Literal["process", "thread"], place: int, process: int, thread: int = 0) -> dict[str, Any]:
    """Set the position of a process among the processes, or of a thread in its process; the lowest is at the top."""
    where = {"pid": process, "tid": _thread(process, thread)}
    return {"ph": "M", "name": f"{what}_sort_index", **where, "args": {"sort_index": place}}


def mark(
    phase: Literal["b", "n", "e"], title: str, process: int, story: int, at_ns: int, what: dict[str, Any]
) -> dict[str, Any]:
    """Make an event of a story: the beginning of a part, an instant, or the end of a part.

    Each story has a row of its own; parts nest, the inner part below the outer.
    """
    place = {"pid": process, "tid": 0, "id2": {"local": story}, "ts": at_ns / _MICRO}
    return {"ph": phase, "name": title, "cat": "trial", **place, "args": what}


def _thread(process: int, thread: int) -> int:
    """Number unique among threads and processes: Perfetto moves a thread numbered like its process to the top."""
    return process * _MOST_ROWS + thread if thread else 0
