"""`LoopThread`: the thread of a loop, which runs only while another thread waits for its next mark.

`LoopTrial` (`loop_trial.py`) resumes the thread from the trial's program, on whichever thread of the pool runs the program, as
a generator is resumed. Until the trial ends, either side sleeps while the other runs, so neither needs a lock. Contexts such as
streams and the capture gate belong to a thread, so the loop's thread leaves its own before each mark, and enters new ones after
the mark.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from hydra_tune.errors import LoopEnded, TaskError

_LOGGER = logging.getLogger(__name__)
_END_SECONDS = 10.0  # longest wait for a loop that goes on although its trial is over


class LoopThread:
    """A thread that runs a function from mark to mark.

    Args:
        run: the function.
        inside: returns the context around the function's code between two marks, made anew for each.

    Attributes:
        thread: the thread, once begun.
    """

    def __init__(
        self, name: str, run: Callable[[], None], inside: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._name, self._run, self._inside = name, run, inside
        self.thread: threading.Thread | None = None
        # Locks that one side takes and the other releases; a semaphore of Python's takes ten times as long.
        self._goes_on, self._has_marked = threading.Lock(), threading.Lock()
        self._goes_on.acquire()
        self._has_marked.acquire()
        self._contexts = ExitStack()
        self._mark: object = None
        self._error: BaseException | None = None
        self._is_over, self._is_ending = False, False

    def check_caller(self) -> None:
        """Refuse, by a `TaskError`, a call of another thread."""
        if threading.current_thread() is not self.thread:
            raise TaskError("a loop belongs to the thread of its function, and another thread has called it")

    def resume(self) -> Any:
        """Let the function run to its next mark, and return the mark; None at the function's end.

        Raises:
            BaseException: the function's error.
        """
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self.thread.start()
        self._goes_on.release()
        self._has_marked.acquire()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._mark

    def mark(self, mark: object) -> None:
        """Wait at a mark until resumed; on the function's own thread.

        Raises:
            LoopEnded: the trial is over.
        """
        self._contexts.close()
        if not self._is_ending:
            self._hand_over(mark)
            self._goes_on.acquire()
        self._contexts.enter_context(self._inside())
        if self._is_ending:
            raise LoopEnded("the trial of this loop is over")

    def end(self) -> None:
        """Have the function end at its mark, and wait for the thread's end, at most ten seconds."""
        if self.thread is None:
            return
        if not self._is_over:
            self._is_ending = True
            self._goes_on.release()
        self.thread.join(_END_SECONDS)
        if self.thread.is_alive():
            _LOGGER.warning("%s goes on although its trial is over, and is left behind; let LoopEnded pass", self._name)

    def _work(self) -> None:
        self._goes_on.acquire()
        try:
            if not self._is_ending:
                self._contexts.enter_context(self._inside())
                self._run()
        except LoopEnded as error:
            # Raised by nobody but `mark`, unless the user's code does.
            self._error = None if self._is_ending else error
        except BaseException as error:
            if self._is_ending:
                _LOGGER.warning("%s has raised an error after the end of its trial", self._name, exc_info=error)
            else:
                self._error = error
        finally:
            try:
                self._contexts.close()
            except BaseException as error:  # noqa: BLE001 - the waiting side has to go on in any case
                self._error = self._error or error
            self._is_over = True
            self._hand_over(None)

    def _hand_over(self, mark: object) -> None:
        self._mark = mark
        self._has_marked.release()
