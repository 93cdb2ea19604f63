"""Look up the paths that a user gives: ~ is expanded, and what can be no path is refused."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from coati_rl.plugins import absolute
from coati_rl.text import shorten


def exists(text: str) -> bool:
    """Return True if a text is the path of what exists; False if it can be none, as it is too long, say."""
    try:
        return bool(text) and absolute(text).exists()
    except (OSError, ValueError):
        return False


def usable(text: str) -> str:
    """Return a path, or a name of the hub, with ~ expanded.

    Raises: ValueError for an empty text, the home of an unknown user, and what cannot be looked up, as it is too long.
    """
    if not text:
        raise ValueError("is empty; give a path, or leave it out")
    path = absolute(text) if text.startswith("~") else Path(text)
    try:
        path.exists()
    except OSError as error:
        raise ValueError(f"{shorten(text)} cannot be looked up ({error.strerror}); use another path") from error
    return str(path) if text.startswith("~") else text


def below_runs(text: str) -> str:
    """Return the name of a run, whose directory is made below runs/.

    Raises: ValueError for one that is empty, leads elsewhere, or cannot be looked up.
    """
    usable(text)
    if not Path(text).parts or Path(text).is_absolute() or ".." in Path(text).parts:
        raise ValueError("is no name of a directory below runs/; give a name such as my-run, or the path as --run-dir")
    return text


UserPath = Annotated[str, AfterValidator(usable)]
OptionalPath = Annotated[str | None, AfterValidator(lambda text: None if text is None else usable(text))]
