"""Keep checkpoints by their tinker:// paths: written whole or not at all, of an owner, listed, expired and deleted.

A directory holds what `TrainingCore.save` writes, and tinker.json. Another owner's is not found,
unless it is published.
"""

import json
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coati_rl.disk import flush, flush_tree
from coati_rl.tinker.api_error import ApiError, not_found
from coati_rl.tinker.core import RequestError

FILE = "tinker.json"
_FORMER = ".former-"  # of directories: a checkpoint that is being overwritten
TRAINING, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
_TYPES = {TRAINING: "training", SAMPLER: "sampler", EXTERNAL: "external"}
_RUN = re.compile(r"([A-Za-z0-9-]{1,64}):train:(\d{1,19})")
_NAME = re.compile(r"[A-Za-z0-9_-][\w.=+-]{0,127}", re.ASCII)
_PATH = "tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Say what a checkpoint is."""

    path: str
    owner: str
    base: str
    rank: int
    flags: Mapping[str, bool]  # what its model trains
    has_optimizer: bool
    made_by: str  # id of the request, so that one that is computed again finds its own
    created: float  # seconds since 1970
    expires: float | None = None
    is_public: bool = False
    metadata: Any = None
    run_metadata: Any = None

    @property
    def run(self) -> str:
        """Return the id of the model that it is of."""
        return self.path.split("/")[2]

    @property
    def id(self) -> str:
        """Return KIND/NAME."""
        return self.path.split("/", 3)[3]

    @property
    def type(self) -> str:
        """Return the API's word for its kind."""
        return _TYPES[self.path.split("/")[3]]


class Checkpoints:
    """Keep checkpoints below a directory."""

    def __init__(self, root: Path) -> None:
        """Remove what a kill left half written; put back what a kill left without its successor."""
        self._root = root
        self._lock = threading.Lock()
        root.mkdir(parents=True, exist_ok=True)
        for former in root.glob(f"{_FORMER}*"):
            found = self._parsed(former / FILE)
            if found is None or self.directory(found.path).exists():
                shutil.rmtree(former, ignore_errors=True)
            else:
                former.rename(self.directory(found.path))
        for pattern in (".part-*", "..part-*", ".gone-*"):  # ..part-*: as former servers left them
            for half in root.glob(pattern):
                shutil.rmtree(half, ignore_errors=True)

    def write(self, checkpoint: Checkpoint, save: Callable[[Path], None], *, overwrites: bool = False) -> None:
        """Write a checkpoint. Raises: RequestError if its path exists, unless it overwrites or is this request's."""
        final = self.directory(checkpoint.path)
        before = self._read(final)
        if before is not None and before.made_by == checkpoint.made_by:
            return
        if before is not None and not overwrites:
            raise RequestError(f"{checkpoint.path} exists; pass overwrite=True, or another name")
        part = self._root / f".part-{uuid.uuid4().hex}"
        whole = part / "whole"  # so that `part` also holds the hidden directories that `save` writes to beside it
        try:
            whole.mkdir(parents=True)
            save(whole)
            (whole / FILE).write_text(json.dumps(asdict(checkpoint)), encoding="utf-8")
            flush_tree(whole)
            self._put(whole, final)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _put(self, whole: Path, final: Path) -> None:
        former = self._root / f"{_FORMER}{uuid.uuid4().hex}"
        with self._lock:
            final.parent.mkdir(parents=True, exist_ok=True)
            if final.exists():
                final.rename(former)
            whole.rename(final)
            flush(final.parent)
        shutil.rmtree(former, ignore_errors=True)

    def find(self, path: str, owner: str, *, may_read: bool = True) -> Checkpoint:
        """Return an owner's checkpoint, or one that is published if it `may_read`. Raises: ApiError, RequestError."""
        found = self._read(self.directory(path))
        if found is None or not (found.owner == owner or (may_read and found.is_public)):
            raise not_found("checkpoint", path)
        return found

    def directory(self, path: str) -> Path:
        """Return where a path's files are. Raises: RequestError for a path of another form."""
        parts = path.removeprefix("tinker://").split("/")
        run = _RUN.fullmatch(parts[0])
        is_path = path.startswith("tinker://") and len(parts) == 3 and run is not None
        if not is_path or run is None or parts[1] not in _TYPES or not _NAME.fullmatch(parts[2]):
            raise RequestError(
                f"{path[:300]!r} is no checkpoint's path: give {_PATH}; a name has letters, digits and . _ - = +"
            )
        return self._root / run[1] / run[2] / parts[1] / parts[2]

    def of(self, owner: str, run: str | None = None) -> list[Checkpoint]:
        """Return an owner's checkpoints, of one run or of all, oldest first."""
        named = None if run is None else _RUN.fullmatch(run)
        if run is not None and named is None:
            return []
        within = "*/*" if named is None else "/".join(named.groups())
        found = [each for each in self._all(within) if each.owner == owner]
        return sorted(found, key=lambda each: (each.created, each.path))

    def num_bytes(self, checkpoint: Checkpoint) -> int:
        """Return the size of a checkpoint's files."""
        return sum(size for _, size in self.files(checkpoint))

    def files(self, checkpoint: Checkpoint) -> list[tuple[str, int]]:
        """Return names and sizes of a checkpoint's files, without this project's own."""
        directory = self.directory(checkpoint.path)
        names = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != FILE)
        return [(path.relative_to(directory).as_posix(), path.stat().st_size) for path in names]

    def check_quota(self, owner: str, limit: int) -> None:
        """Raise RequestError if an owner's checkpoints have reached a number of bytes."""
        used = sum(self.num_bytes(each) for each in self.of(owner))
        if used >= limit:
            raise RequestError(
                f"the checkpoints of this key have {used} bytes of {limit}: delete some with "
                "RestClient.delete_checkpoint, or save them with ttl_seconds"
            )

    def check_made_by(self, directory: Path, made_by: str) -> None:
        """Raise RequestError if the checkpoint that a request made is not in a directory any more."""
        found = self._parsed(directory / FILE)
        if found is None or found.made_by != made_by:
            raise RequestError("the checkpoint of this sampler was overwritten or deleted; make a new sampling client")

    def delete(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint."""
        with self._lock:
            gone = self._root / f".gone-{uuid.uuid4().hex}"
            try:
                self.directory(checkpoint.path).rename(gone)
            except FileNotFoundError:
                return
        shutil.rmtree(gone, ignore_errors=True)

    def change(self, checkpoint: Checkpoint, **fields: Any) -> None:
        """Change what a checkpoint says of itself."""
        file = self.directory(checkpoint.path) / FILE
        with self._lock:
            if not file.exists():
                raise ApiError(404, f"no checkpoint {checkpoint.path!r}: it was deleted meanwhile")
            new = file.with_name(f".{FILE}.new")
            new.write_text(json.dumps(asdict(replace(checkpoint, **fields))), encoding="utf-8")
            new.replace(file)
            flush(file.parent)

    def delete_expired(self) -> None:
        """Remove the checkpoints whose time is over."""
        for file in self._root.glob(f"*/*/*/*/{FILE}"):
            found = self._parsed(file)
            if found is not None and _has_expired(found):
                self.delete(found)

    def _all(self, within: str) -> Iterator[Checkpoint]:
        for file in self._root.glob(f"{within}/*/*/{FILE}"):
            found = self._read(file.parent)
            if found is not None:
                yield found

    def _read(self, directory: Path) -> Checkpoint | None:
        found = self._parsed(directory / FILE)
        return None if found is None or _has_expired(found) else found

    @staticmethod
    def _parsed(file: Path) -> Checkpoint | None:
        try:
            return Checkpoint(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # deleted meanwhile, or no file of this server
            return None


def _has_expired(checkpoint: Checkpoint) -> bool:
    return checkpoint.expires is not None and checkpoint.expires <= time.time()
