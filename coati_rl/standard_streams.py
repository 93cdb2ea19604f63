"""Have a command that was started with closed standard streams (`>&-`) write to /dev/null instead.

Otherwise the next file that is opened becomes the stream: what a library prints would be in a checkpoint.
"""

import os
import sys


def open_closed_streams() -> None:
    """Open /dev/null in place of standard input, output and error where they are closed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is the stream's
            os.set_inheritable(null, null == number)
            setattr(sys, name, os.fdopen(null, "w" if number else "r", encoding="utf-8", errors="backslashreplace"))
