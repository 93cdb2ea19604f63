"""Find, verify and delete checkpoint directories, and read and write their state; tensors are handled elsewhere.

    <checkpoints>/step-<N>/state.json     format_version (see `coati_rl.checkpoint.format`), step, policy_version,
                                          rng_state, "data" (see `coati_rl.checkpoint.position`), and template_date if
                                          chat templates write the date (see `coati_rl.reading.chat_template`)
                           rollouts.npz   sampled, not yet trained; see `coati_rl.checkpoint.untrained_rollouts`
                           manifest.json  size and digest of every other file

A checkpoint is written to a hidden directory, whose last file is that of `write_manifest`, and then renamed: under its
final name it is complete. Later damage is found by `read_state`.
"""

import json
import logging
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import xxhash

from coati_rl.checkpoint.format import FORMAT_VERSION, VERSION_KEY, migrate_state
from coati_rl.errors import ConfigError

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
OBJECTIVE_KEY = "objective"  # of the state: what a run's objective has adapted; absent if it adapts nothing
MANIFEST_FILE = "manifest.json"
ROLLOUTS_FILE = "rollouts.npz"
BEST_LINK = "best"  # to one of the directory's checkpoints; see `coati_rl.checkpoint.best`
_BLOCK_BYTES = 2**22
_NAME = re.compile(r"step-(\d+)")
_ASIDE = re.compile(r"\.step-\d+\.deleted")
_REMEDY = "give -cp a directory step-<N> that this project wrote, or one above it"


def role_directory(checkpoint: Path, role: str) -> Path:
    """Return where a checkpoint has a trained model beside the policy, which may not be there."""
    return checkpoint / role


def write_manifest(directory: Path, digests: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write the list of all files in the directory and its subdirectories; the last file of a checkpoint.

    Args:
        directory: of the checkpoint.
        digests: of files that need not be read, by name.
    """
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file() and path != directory / MANIFEST_FILE]
    files = {
        name: {"bytes": path.stat().st_size, "xxh3_128": digests.get(name) or _digest(path)}
        for name, path in ((path.relative_to(directory).as_posix(), path) for path in paths)
    }
    (directory / MANIFEST_FILE).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint at a path, or the newest complete one of a run or of a directory of checkpoints.

    Raises: ConfigError if there is none.
    """
    path = path.expanduser().absolute()
    path = path.resolve() if path.is_symlink() else path  # the name of a checkpoint has its step
    if (path / STATE_FILE).is_file():
        return path
    for directory in (path, path / "checkpoints"):
        if checkpoint := newest_complete(directory):
            return checkpoint
    raise ConfigError(f"--checkpoint-path {path}: there is no checkpoint; {_REMEDY}")


def newest_complete(directory: Path) -> Path | None:
    """Return the newest checkpoint without missing or truncated files; the digests are not compared."""
    for checkpoint in reversed(checkpoints_in(directory)):
        problem = _incomplete(checkpoint)
        if problem is None:
            return checkpoint
        logger.warning("%s is skipped: %s", checkpoint, problem)
    return None


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the checkpoints of a directory, the oldest first."""
    found = directory.iterdir() if directory.is_dir() else iter(())
    return sorted((path for path in found if path.is_dir() and _NAME.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step in the name of a checkpoint, -1 if it has none."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def write_state(directory: Path, state: Mapping[str, Any]) -> None:
    """Write the state of a checkpoint as JSON in the newest format."""
    text = json.dumps({VERSION_KEY: FORMAT_VERSION, **state}, indent=2, sort_keys=True)
    (directory / STATE_FILE).write_text(text + "\n", encoding="utf-8")


def load_state(directory: Path) -> dict[str, Any]:
    """Read the state of a checkpoint that is known to be intact, in the newest format.

    Raises: ConfigError if it was written in a later format; ValueError if it is not a state.
    """
    try:
        state = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{STATE_FILE} is not JSON: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{STATE_FILE} holds no object")
    try:
        return migrate_state(state)
    except ValueError as error:
        raise ConfigError(
            f"--checkpoint-path {directory}: {error}, or start from its weights alone with --model"
        ) from error


def read_state(directory: Path) -> dict[str, Any]:
    """Verify every byte of a checkpoint by its manifest, and return its state in the newest format.

    Raises: ConfigError naming the file that is missing or differs, or the unknown format.
    """
    problem = _incomplete(directory) or _differing(directory)
    if problem is None:
        try:
            return load_state(directory)
        except ValueError as error:
            problem = str(error)
    intact = next((path for path in _others(directory) if not (_incomplete(path) or _differing(path))), None)
    remedy = _REMEDY if intact is None else f"the newest intact one in the same directory is -cp {intact}"
    raise ConfigError(f"--checkpoint-path {directory} is not a checkpoint to resume from: {problem}; {remedy}")


def _others(checkpoint: Path) -> list[Path]:
    """Return the other checkpoints of the same directory, the newest first."""
    return [path for path in reversed(checkpoints_in(checkpoint.parent)) if path != checkpoint]


def left_over_bytes(directory: Path) -> int:
    """Return the size of partly written checkpoints, which the next one to be written deletes."""
    return sum(path.stat().st_size for path in directory.glob(".step-*.partial/**/*") if path.is_file())


def prune(checkpoint_dir: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and the one that is named as the best.

    Each is renamed first, so that no partly deleted one has a checkpoint's name; those left by a killed run are deleted
    as well.
    """
    for left_over in [path for path in checkpoint_dir.iterdir() if _ASIDE.fullmatch(path.name)]:
        shutil.rmtree(left_over)
    best = checkpoint_dir / BEST_LINK
    named = best.readlink().name if best.is_symlink() else None
    for checkpoint in [path for path in checkpoints_in(checkpoint_dir)[:-keep] if path.name != named]:
        shutil.rmtree(checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.deleted")))


def _incomplete(directory: Path) -> str | None:
    """Return which file is missing or has another size, None if none."""
    try:
        files = _manifest(directory)
        _check_names(files)
        for name, (size, _) in files.items():
            found = (directory / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(directory)} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST_FILE} cannot be read: {_error_text(error)}"
    return None if STATE_FILE in files else f"{MANIFEST_FILE} does not name {STATE_FILE}"


def _check_names(names: Iterable[str]) -> None:
    """Raise ValueError for a name outside the checkpoint, with `..` or an absolute path."""
    for name in names:
        path = PurePath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise ValueError(f"it names {name!r}, which is not in the checkpoint")


def _differing(directory: Path) -> str | None:
    for name, (_, written) in _manifest(directory).items():
        try:
            digest = _digest(directory / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if digest != written:
            return f"{name} was changed: its digest is {digest} instead of {written}"
    return None


def _manifest(directory: Path) -> dict[str, tuple[int, str]]:
    """Return size in bytes and digest by name. Raises: OSError, ValueError, KeyError, TypeError, AttributeError."""
    manifest: dict[str, dict[str, dict[str, Any]]] = json.loads((directory / MANIFEST_FILE).read_text(encoding="utf-8"))
    return {name: (int(entry["bytes"]), str(entry["xxh3_128"])) for name, entry in manifest["files"].items()}


def _error_text(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            hasher.update(block)
    return str(hasher.hexdigest())
