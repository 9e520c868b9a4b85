"""Processes that train models at the same time on one device (`gpu_models.py`), each with a context of its own."""

import subprocess
import sys
import threading
from pathlib import Path

import psutil

SCRIPT = Path(__file__).with_name("gpu_models.py")
FREE_SHARE = 0.8  # of the host's free memory, that more of them may take
MIB = 1 << 20


class NoRoomError(Exception):
    """The host's memory is too small for so many."""


class TooSlowError(Exception):
    """They have not answered in time."""


class Processes:
    """Started when they are first wanted, and used again for every model.

    Args:
        device: as torch names it.
        seconds: for which each of them makes steps.
    """

    def __init__(self, device, seconds):
        self._command = [sys.executable, str(SCRIPT), device, str(seconds)]
        self._started = []

    def __len__(self):
        return len(self._started)

    def rate(self, name, count, timeout):
        """Steps per second of so many at once, all together.

        Args:
            name: of the model.
            count: of processes.
            timeout: seconds until they have to be done.

        Raises:
            NoRoomError: the host has too little memory for them.
            TooSlowError: they are not done by then.
            RuntimeError: one has failed; with what it has said last.
        """
        self._check_memory(count)
        while len(self._started) < count:
            self._started.append(subprocess.Popen(self._command, stdin=-1, stdout=-1, stderr=-1, text=True))
        those = self._started[:count]
        overdue = threading.Timer(timeout, lambda: [process.kill() for process in those])
        overdue.start()
        try:
            for word in (name, "go"):
                for process in those:
                    process.stdin.write(word + "\n")
                    process.stdin.flush()
                answers = [process.stdout.readline() for process in those]
                self._check(those, answers, overdue)
        except BrokenPipeError:
            self._check(those, [""] * count, overdue)
            raise
        finally:
            overdue.cancel()
        return sum(map(float, answers))

    def close(self):
        """End them."""
        for process in self._started:
            process.kill()
        for process in self._started:
            process.communicate()
        self._started.clear()

    def _check_memory(self, count):
        """Refuse more than there is room for, going by what those take that there are."""
        if not self._started or count <= len(self._started):
            return
        each = max(psutil.Process(process.pid).memory_info().rss for process in self._started)
        more, free = (count - len(self._started)) * each, psutil.virtual_memory().available
        if more > FREE_SHARE * free:
            raise NoRoomError(f"{count} processes of {each // MIB} MiB each, and {free // MIB} MiB free")

    def _check(self, those, answers, overdue):
        lost = [process for process, answer in zip(those, answers, strict=True) if not answer]
        if not lost:
            return
        is_late = not overdue.is_alive()
        overdue.cancel()
        for process in lost:
            process.kill()
        said = [process.stderr.read().strip().splitlines() for process in lost]
        self.close()
        if is_late:
            raise TooSlowError(f"{len(those)} processes were not done in time")
        raise RuntimeError(next((lines[-1] for lines in said if lines), "a process has ended without a word"))
