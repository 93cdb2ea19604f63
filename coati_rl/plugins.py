"""Load a user's own function, given as FILE.py:FUNCTION; it runs with the user's rights.

Files that were written for other systems find what these have users import: `coati_rl.stand_ins`.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.stand_ins import finder


def is_plugin(name: str) -> bool:
    """Return True for FILE.py:FUNCTION, False for a built-in name."""
    return ":" in name


def absolute(path: str) -> Path:
    """Return the path made absolute, with ~ expanded. Raises: ValueError for the home of an unknown user."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from error


def absolute_plugin(name: str) -> str:
    """Return FILE.py:FUNCTION with an absolute path; a built-in name is returned unchanged.

    A function is loaded by several processes, whose working directories differ.

    Raises: ValueError for the home of an unknown user.
    """
    path, colon, function = name.rpartition(":")
    return f"{absolute(path)}:{function}" if colon else name


def load_function(name: str, *, flag: str) -> Callable[..., Any]:
    """Import the file, once in a process, and return its function.

    Args:
        name: FILE.py:FUNCTION, with an absolute path.
        flag: the flag that named it, for the message.
    Raises: ConfigError if the file cannot be imported, or has no such function.
    """
    path_text, _, function_name = name.rpartition(":")
    module = load_module(Path(path_text), name, flag=flag)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{flag} {name}: {path_text} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]


def load_module(path: Path, name: str, *, flag: str) -> ModuleType:
    """Import a user's file, once in a process.

    Args:
        path: absolute.
        name: that the flag has, for the message.
        flag: the flag that named it.
    Raises: ConfigError if the file cannot be imported.
    """
    if not path.is_file():
        raise ConfigError(f"{flag} {name}: there is no file {path}; write FILE.py:FUNCTION")
    module_name = f"coati_rl_plugin_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{flag} {name}: {path} is not a Python file; write FILE.py:FUNCTION")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        finder.install()
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # whatever a user's file raises
            del sys.modules[module_name]
            cause = f"{type(error).__name__}: {error}{finder.remedy(error)}"
            raise ConfigError(f"{flag} {name}: {path} fails on import: {cause}") from error
    return module
