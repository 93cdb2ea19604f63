"""A checkpoint as files: which directory is one, whether all of it is there, which ones may go. No tensors here.

    <checkpoints>/step-<N>/state.json     format_version (see `coati_rl.checkpoint.format`), step, policy_version,
                                          rng_state, "data" (see `coati_rl.checkpoint.position`)
                           rollouts.npz   what is sampled and not trained; see `coati_rl.checkpoint.kept_rollouts`
                           manifest.json  every other file with its bytes and its digest

Whoever writes a checkpoint fills a hidden directory, ends with `write_manifest` and renames it: under its name a
checkpoint is complete. What is damaged later is found by `read_state`.
"""

import json
import logging
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import xxhash

from coati_rl.checkpoint.format import FORMAT_VERSION, VERSION_KEY, migrate_state
from coati_rl.errors import ConfigError

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
ROLLOUTS_FILE = "rollouts.npz"
_BLOCK_BYTES = 2**22
_NAME = re.compile(r"step-(\d+)")
_ASIDE = re.compile(r"\.step-\d+\.deleted")
_REMEDY = "give -cp a directory step-<N> that this project wrote, or one above it"


def write_manifest(directory: Path) -> None:
    """List what the directory holds, subdirectories too; the last file that is written."""
    files = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "xxh3_128": _digest(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path != directory / MANIFEST_FILE
    }
    (directory / MANIFEST_FILE).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest complete one of a run or of a directory of checkpoints.

    Raises: ConfigError if there is none.
    """
    path = path.expanduser().absolute()
    if (path / STATE_FILE).is_file():
        return path
    for directory in (path, path / "checkpoints"):
        if checkpoint := newest_complete(directory):
            return checkpoint
    raise ConfigError(f"--checkpoint-path {path}: no checkpoint is there; {_REMEDY}")


def newest_complete(directory: Path) -> Path | None:
    """Find the newest checkpoint of which no file is missing or cut off; the digests are not compared."""
    for checkpoint in reversed(checkpoints_in(directory)):
        problem = _incomplete(checkpoint)
        if problem is None:
            return checkpoint
        logger.warning("%s is passed over: %s", checkpoint, problem)
    return None


def checkpoints_in(directory: Path) -> list[Path]:
    """The checkpoints of a directory, the oldest first."""
    found = directory.iterdir() if directory.is_dir() else iter(())
    return sorted((path for path in found if path.is_dir() and _NAME.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer step in the name of a checkpoint, -1 if there is none."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def write_state(directory: Path, state: Mapping[str, Any]) -> None:
    """Write the state of a checkpoint, JSON in the newest format."""
    text = json.dumps({VERSION_KEY: FORMAT_VERSION, **state}, indent=2, sort_keys=True)
    (directory / STATE_FILE).write_text(text + "\n", encoding="utf-8")


def load_state(directory: Path) -> dict[str, Any]:
    """The state of a checkpoint that is known to be intact, in the newest format.

    Raises: ConfigError if it was written in a later one; ValueError if it is no state at all.
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
    """The state of a checkpoint, in the newest format; every byte of it is compared with its manifest.

    Raises: ConfigError naming the file that is missing or differs, or the format that is not known.
    """
    problem = _incomplete(directory) or _differing(directory)
    if problem is None:
        try:
            return load_state(directory)
        except ValueError as error:
            problem = str(error)
    intact = next((path for path in _others(directory) if not (_incomplete(path) or _differing(path))), None)
    remedy = _REMEDY if intact is None else f"the newest intact one beside it is -cp {intact}"
    raise ConfigError(f"--checkpoint-path {directory} is no checkpoint to resume from: {problem}; {remedy}")


def _others(checkpoint: Path) -> list[Path]:
    """The checkpoints beside one, the newest first."""
    return [path for path in reversed(checkpoints_in(checkpoint.parent)) if path != checkpoint]


def left_over_bytes(directory: Path) -> int:
    """Add up what half-written checkpoints take; the next one to be written deletes them."""
    return sum(path.stat().st_size for path in directory.glob(".step-*.partial/**/*") if path.is_file())


def prune(checkpoint_dir: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints.

    Each is renamed first, so that half of one is never seen under its name; what a killed run left of that goes too.
    """
    for left_over in [path for path in checkpoint_dir.iterdir() if _ASIDE.fullmatch(path.name)]:
        shutil.rmtree(left_over)
    for checkpoint in checkpoints_in(checkpoint_dir)[:-keep]:
        shutil.rmtree(checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.deleted")))


def _incomplete(directory: Path) -> str | None:
    """Return what is missing or has another size, None if nothing."""
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
        return f"{MANIFEST_FILE} cannot be read: {_said(error)}"
    return None if STATE_FILE in files else f"{MANIFEST_FILE} does not name {STATE_FILE}"


def _check_names(names: Iterable[str]) -> None:
    """Refuse a name that leads out of the checkpoint, by `..` or from the root. Raises: ValueError."""
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
            return f"{name} is not what was written: its digest is {digest} instead of {written}"
    return None


def _manifest(directory: Path) -> dict[str, tuple[int, str]]:
    """Name -> bytes, digest. Raises: OSError, or what a manifest with other keys than ours leads to."""
    manifest: dict[str, dict[str, dict[str, Any]]] = json.loads((directory / MANIFEST_FILE).read_text(encoding="utf-8"))
    return {name: (int(entry["bytes"]), str(entry["xxh3_128"])) for name, entry in manifest["files"].items()}


def _said(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            hasher.update(block)
    return str(hasher.hexdigest())
