"""Live display of a pool's jobs during a `with` block: on a terminal, below a notebook's cell, or as plain lines.

`HydraExecutor.live` (`hydra_tune/executor.py`) enters `shown` at the start of the block, and adds each job of the pool
to the monitor. The display calls `snapshot` on a thread of its own, and must never hold training up; outside notebooks,
the caller's thread takes a last snapshot for the summary.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console

from hydra_tune.observe.live.notebook import NotebookView, is_notebook
from hydra_tune.observe.live.plain_lines import PlainView, RateLimit
from hydra_tune.observe.live.printed import kept
from hydra_tune.observe.live.snapshot import Goal, SweepView
from hydra_tune.observe.live.summary import print_summary, trial_line
from hydra_tune.observe.live.terminal import LiveView
from hydra_tune.pool.stats import PoolStats
from hydra_tune.pool.views.live_snapshot import SweepMonitor

_NUM_RECENT = 200


@contextmanager
def shown(name: str, goal: Goal, stats: Callable[[], PoolStats]) -> Iterator[SweepMonitor]:
    """Show jobs until the end of the block, and then, except in a notebook, a summary.

    Args:
        name: title of the display.
        goal: direction in which the first metric of the tasks improves.
        stats: returns the pool's statistics; called on the display's thread, and on the caller's thread.

    Yields:
        The monitor, to which the caller adds jobs.
    """
    console = Console(file=sys.stdout, highlight=False)
    recent: deque[str] = deque(maxlen=_NUM_RECENT)
    on_terminal = sys.stdout.isatty() and not console.is_dumb_terminal
    # Kept now: `kept` redirects `sys.stdout` while the block runs.
    out = sys.stdout
    say = RateLimit(lambda line: print(line, file=out, flush=True))
    tell: Callable[[str], None] = recent.append if on_terminal or is_notebook() else say
    monitor = SweepMonitor(name, goal, lambda trial, metric: tell(trial_line(trial, metric)))

    def snapshot() -> SweepView:
        return monitor.snapshot(stats())

    if is_notebook():
        with NotebookView(snapshot):
            yield monitor
        return
    try:
        with ExitStack() as shows:
            if on_terminal:
                shows.enter_context(kept(recent))
            shows.enter_context(LiveView(console, snapshot, recent) if on_terminal else PlainView(say, snapshot))
            yield monitor
    finally:
        view = monitor.snapshot(stats(), is_over=True)
        say.flush()
        print_summary(console, view)
