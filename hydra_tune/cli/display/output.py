"""Output of a sweep: a live view, a line for each trial, or one JSON object.

`SweepOutput` chooses among the three, and keeps output of user code out of the live view and the JSON.
`cli/run/sweep_run.py` and `cli/run/cluster.py` make the output before any user code is imported, and print the summary
through the same output; `cli/dry_run/checking.py` and `cli/dry_run/planning.py` use `quiet` alone. The module must not run
anything.

Note: signals. `note` and `abandon` run on the thread that listens to signals while any other thread may hang, so they
take no lock and write to descriptors.
"""

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

from rich.console import Console

from hydra_tune.cli.display.isolation import TERMINAL_BACK
from hydra_tune.cli.sweep_file.options import DisplayOptions
from hydra_tune.observe.live.plain_lines import PlainView, RateLimit
from hydra_tune.observe.live.printed import kept
from hydra_tune.observe.live.snapshot import SweepView
from hydra_tune.observe.live.summary import print_summary, to_json
from hydra_tune.observe.live.terminal import LiveView

_NUM_RECENT = 200


class SweepOutput:
    """Standard output of one sweep."""

    def __init__(self, display: DisplayOptions) -> None:
        # Kept from the start, because `quiet` and the live view redirect the names in `sys`.
        self._stdout = sys.stdout
        self._stderr = sys.stderr
        self._console = Console(file=self._stdout, highlight=False)
        self._as_json = display.as_json
        terminal = self._stdout.isatty() and not self._console.is_dumb_terminal
        self._live = display.live and terminal and not display.as_json
        self._is_shown = False
        self._recent: deque[str] = deque(maxlen=_NUM_RECENT)
        # Standard output has room for the JSON object only.
        lines_to = self._stderr if self._as_json else self._stdout
        # Line and end in one write: a crash in between, of a process without buffers, would leave half a line.
        self._say = RateLimit(lambda line: print(f"{line}\n", end="", file=lines_to, flush=True))

    def log(self, line: str) -> None:
        """Show one line: an ended trial, a note or a warning; with a live view, beside the picture."""
        if self._live:
            self._recent.append(line)
        else:
            self._say(line)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Within the block, keep output of user code off standard output, if standard output is for JSON.

        The code's threads and processes, such as loader workers, must end within the block, too.
        """
        if self._as_json:
            with redirect_stdout(self._stderr), _descriptor_redirected(self._stdout, self._stderr):
                yield
        else:
            yield

    @contextmanager
    def showing(self, snapshot: Callable[[], SweepView]) -> Iterator[None]:
        """Show the sweep within the block; the views call `snapshot` on another thread, the live view first on this thread."""
        if self._live:
            # Read by `note` and `abandon` on the thread that listens to signals.
            self._is_shown = True
            try:
                # The view ends first, so that the captured lines are printed on the restored screen.
                with kept(self._recent), LiveView(self._console, snapshot, self._recent):
                    yield
            finally:
                self._is_shown = False
            return
        try:
            with PlainView(self._say, snapshot):
                yield
        finally:
            self._say.flush()

    def note(self, text: str) -> None:
        """Write one line beside the sweep, unless a live view has the terminal; takes no lock, as a thread may hold it."""
        if not self._is_shown:
            # os.write, not print: a thread that is stuck may hold the stream's own lock.
            os.write(self._stderr.fileno(), f"{text}\n".encode())

    def abandon(self, text: str) -> None:
        """Restore the terminal and write one line, in a process about to end; takes no lock, as a thread may hold it."""
        if self._is_shown:
            os.write(self._stdout.fileno(), TERMINAL_BACK)
        os.write(self._stderr.fileno(), f"{text}\n".encode())

    def report(self, view: SweepView) -> None:
        """Show the result of the sweep."""
        if self._as_json:
            json.dump(to_json(view), self._stdout, allow_nan=False)
            self._stdout.write("\n")
            self._stdout.flush()
        else:
            print_summary(self._console, view)


@contextmanager
def _descriptor_redirected(stream: TextIO, target: TextIO) -> Iterator[None]:
    """Redirect a stream's descriptor as well: loader workers, other child processes and native code write there."""
    try:
        number, target_number = stream.fileno(), target.fileno()
    except OSError:  # a stream in memory
        yield
        return
    stream.flush()
    kept_number = os.dup(number)
    os.dup2(target_number, number)
    try:
        yield
    finally:
        # Texts that somebody has written past `sys.stdout` go where all others have gone.
        stream.flush()
        os.dup2(kept_number, number)
        os.close(kept_number)
