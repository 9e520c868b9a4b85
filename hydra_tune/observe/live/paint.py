"""Paints lines on a terminal's screen, sending only lines that have changed, but for every tenth picture and each new size.

Unchanged lines are not sent as a rule, so nothing flickers, and painting costs a third of a full redraw through rich.
`LiveView` (`terminal.py`) opens an `AlternateScreen` when a sweep's view begins, and paints each new picture there. The
module must not know the engine: only lines of text come in. An `AlternateScreen` writes to the terminal under its lock.
"""

import threading

from rich.console import COLOR_SYSTEMS, Console
from rich.segment import Segment

from hydra_tune.observe.live.rows import Line

_REPAINT = 10  # every this many pictures all lines are sent: programs may write to the terminal past the screen


class AlternateScreen:
    """The second screen of a terminal. Thread-safe."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._colors = COLOR_SYSTEMS[console.color_system] if console.color_system else None
        self._shown: list[str] = []
        self._size = (0, 0)
        self._num_painted = 0
        self._is_open = False
        self._lock = threading.Lock()

    @property
    def size(self) -> tuple[int, int]:
        """Present columns and lines of the terminal."""
        return self._console.size.width, self._console.size.height

    @property
    def is_ascii(self) -> bool:
        """Whether the terminal takes only ASCII characters."""
        return self._console.options.ascii_only

    def open(self) -> None:
        """Switch to the second screen."""
        with self._lock:
            self._is_open = True
            self._console.set_alt_screen(True)
            self._console.show_cursor(False)

    def close(self) -> None:
        """Restore the terminal, cursor included. May be called again."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._console.show_cursor(True)
                self._console.set_alt_screen(False)

    def paint(self, lines: list[Line], size: tuple[int, int]) -> None:
        """Show lines, from the top.

        Args:
            lines: no more, and no wider, than fit the screen.
            size: columns and lines for which the lines were made.
        """
        width = size[0]
        texts = [self._text(line, width) for line in lines]
        with self._lock:
            # The ticker's thread may have made this picture before `close`, which has restored the terminal since.
            if not self._is_open:
                return
            # After a resize the terminal has moved or wrapped the lines in its own way.
            is_all = size != self._size or self._num_painted % _REPAINT == 0
            parts = [
                f"\x1b[{number};1H{text}"
                for number, text in enumerate(texts, 1)
                if is_all or number > len(self._shown) or text != self._shown[number - 1]
            ]
            if len(texts) < size[1] and (is_all or len(texts) < len(self._shown)):
                # Erases what a longer picture has left below.
                parts.append(f"\x1b[{len(texts) + 1};1H\x1b[J")
            self._shown, self._size = texts, size
            self._num_painted += 1
            if parts:
                self._console.file.write("".join(parts))
                self._console.file.flush()

    def _text(self, line: Line, width: int) -> str:
        text = "".join(self._styled(segment) for segment in line)
        # Not behind a full line: there the cursor still stands on the last character, and the erasure would remove it.
        return text + "\x1b[K" if Segment.get_line_length(line) < width else text

    def _styled(self, segment: Segment) -> str:
        style = segment.style
        if style is None:
            return segment.text
        if self._console.no_color:
            style = style.without_color
        return style.render(segment.text, color_system=self._colors)
