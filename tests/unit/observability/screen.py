"""Read what a terminal shows: the lines of its screen and those that have scrolled out, from the bytes it was sent.

Of the control sequences it knows those that a run sends; another one is an error, so that no other state is changed.
"""

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
import unicodedata

_CODES = re.compile(r"\x1b\[(\d*(?:;\d+)*)([A-Za-z])|(\x1b.?)")


def until(is_true, timeout_s=10.0):
    """Return when a condition holds, which another thread or process brings about."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)


class Screen:
    """A terminal of so many columns and rows."""

    def __init__(self, columns=80, rows=24):
        self.columns, self.rows = columns, rows
        self.lines = [""]  # with those that have scrolled out
        self.row, self.column = 0, 0
        self._rest = ""

    def feed(self, text):
        """Take what was written; a sequence may be cut."""
        text, self._rest = self._rest + text, ""
        at = 0
        for found in _CODES.finditer(text):
            if found[3] and len(found[3]) < 2:
                break
            self._write(text[at : found.start()])
            at = found.end()
            self._control(found[2], found[1], found[3])
        cut = re.search(r"\x1b(\[[\d;]*)?$", text[at:])
        end = at + cut.start() if cut else len(text)
        self._write(text[at:end])
        self._rest = text[end:]

    @property
    def shown(self):
        """Return all lines, without blanks at their ends."""
        return [line.rstrip() for line in self.lines]

    def resize(self, columns):
        """Break lines anew, as most terminals do, that are longer than the new width; the cursor stays at its text."""
        before, self.columns, above = self.lines, columns, 0
        self.lines = []
        for row, line in enumerate(before):
            above = len(self.lines) if row == self.row else above
            self.lines += [line[at : at + columns] for at in range(0, max(len(line), 1), columns)]
        self.row = above

    def _control(self, letter, number, other):
        if letter == "m":
            return
        if letter == "A":
            self.row = max(self.row - int(number or 1), len(self.lines) - self.rows, 0)
        elif letter == "K" and not number:
            self.lines[self.row] = self.lines[self.row][: self.column]
        elif letter == "J" and not number:
            del self.lines[self.row + 1 :]
            self.lines[self.row] = self.lines[self.row][: self.column]
        else:
            raise AssertionError(f"a terminal is sent {other or letter!r} with {number!r}")

    def _write(self, text):
        for character in text:
            if character == "\r":
                self.column = 0
            elif character == "\n":
                self._next_row()
            elif unicodedata.category(character) == "Cc" and character != "\t":
                raise AssertionError(f"a terminal is sent the control character {character!r}")
            else:
                if self.column >= self.columns:
                    self._next_row()
                    self.column = 0
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
                self.column += 1

    def _next_row(self):
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")


class Terminal:
    """A pseudo-terminal: what is written to `stream` is shown on `screen`."""

    def __init__(self, columns=80, rows=24):
        self.master, slave = pty.openpty()
        self.screen = Screen(columns, rows)
        self.resize(columns, rows)
        self.stream = os.fdopen(slave, "w", encoding="utf-8")
        self.bytes = b""

    def resize(self, columns, rows=24):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if columns != self.screen.columns:
            self.screen.resize(columns)

    def read(self, timeout_s=0.0):
        """Take what was written so far, or is within the time. Returns: the lines that are shown."""
        while select.select([self.master], [], [], timeout_s)[0]:
            data = os.read(self.master, 65536)
            self.bytes += data
            self.screen.feed(data.decode())
        return self.screen.shown

    def shows(self, text):
        return any(text in line for line in self.read())
