"""Turn what ends a command into a message and an exit code, the same ones in every command that trains nothing."""

from collections.abc import Callable

from coati_rl.errors import CoatiError, ConfigError
from coati_rl.processes.exit_messages import print_lines


def exit_code_of(body: Callable[[], object], *, prog: str, goes_on: str = "") -> int:
    """Run a command.

    Args:
        body: of the command.
        prog: the program's name in messages.
        goes_on: how a command that ended early is continued, with a semicolon before it; empty if it is not.
    Returns: 0; 2 for a mistake of the user's, 1 for a failure, 130 for Ctrl-C.
    """
    try:
        body()
    except ConfigError as error:
        print_lines(str(error), prog=prog)
        return 2
    except CoatiError as error:
        print_lines(f"failed: {' '.join(str(error).split())}{goes_on}", prog=prog)
        return 1
    except KeyboardInterrupt:
        print_lines(f"interrupted{goes_on}", prog=prog)
        return 130
    return 0
