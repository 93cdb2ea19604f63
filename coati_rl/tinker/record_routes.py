"""List, change, delete and hand out checkpoints: the routes of the client's RestClient."""

import datetime
import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import FileResponse

from coati_rl.tinker.api_error import ApiError, not_found
from coati_rl.tinker.bodies import PathBody, Ttl
from coati_rl.tinker.checkpoints import Checkpoint
from coati_rl.tinker.http_bodies import read_json
from coati_rl.tinker.service import Service

Owner = Callable[[Request], Awaitable[str]]
_URL_S = 3600  # that a URL of a file is good for
_MAX_LISTED = 1000


def record_router(service: Service, owner_of: Owner, *, prefix: str) -> APIRouter:
    """Return the routes; `prefix` is of their paths."""
    router, checkpoints, limit = APIRouter(), service.checkpoints, service.limits.max_body_bytes
    signs = _Signatures()

    def one(run: str, checkpoint: str, owner: str, *, may_read: bool = False) -> Checkpoint:
        return checkpoints.find(f"tinker://{run}/{checkpoint}", owner, may_read=may_read)

    def listed(found: list[Checkpoint], limit: int, offset: int) -> Any:
        page = found[offset : offset + limit]
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"checkpoints": [_shown(service, each) for each in page], "cursor": cursor}

    @router.get("/checkpoints")
    async def all_checkpoints(owner: str = Depends(owner_of), limit: int = 100, offset: int = 0) -> Any:
        return listed(checkpoints.of(owner), *_page(limit, offset))

    @router.get("/training_runs")
    async def training_runs(owner: str = Depends(owner_of), limit: int = 20, offset: int = 0) -> Any:
        limit, offset = _page(limit, offset)
        runs = list(dict.fromkeys(each.run for each in checkpoints.of(owner)))
        cursor = {"offset": offset, "limit": limit, "total_count": len(runs)}
        return {"training_runs": [_run(service, owner, each) for each in runs[offset : offset + limit]], "cursor": cursor}

    @router.get("/training_runs/{run}")
    async def training_run(run: str, owner: str = Depends(owner_of)) -> Any:
        return _run(service, owner, run)

    @router.get("/training_runs/{run}/checkpoints")
    async def of_run(run: str, owner: str = Depends(owner_of)) -> Any:
        return listed(checkpoints.of(owner, run), _MAX_LISTED, 0)

    @router.post("/weights_info")
    async def weights_info(request: Request, owner: str = Depends(owner_of)) -> Any:
        found = checkpoints.find((await read_json(request, PathBody, limit)).tinker_path, owner)
        return {"base_model": found.base, "is_lora": found.rank > 0, "lora_rank": found.rank or None, **found.flags}

    @router.get("/training_runs/{run}/checkpoints/{checkpoint:path}/external_weights_urls")
    async def urls(request: Request, run: str, checkpoint: str, owner: str = Depends(owner_of)) -> Any:
        found, expires = one(run, checkpoint, owner, may_read=True), int(time.time()) + _URL_S
        base = f"{str(request.base_url).rstrip('/')}{prefix}/files"
        names = [name for name, _ in checkpoints.files(found)]
        links = {
            name: f"{base}/{expires}/{signs.sign(found.path, name, expires)}/{found.run}/{found.id}/{name}"
            for name in names
        }
        return {"urls": links, "expires": _time(expires)}

    @router.get("/files/{expires}/{signature}/{run}/{kind}/{name}/{file:path}")
    async def file(expires: int, signature: str, run: str, kind: str, name: str, file: str) -> Any:
        path = f"tinker://{run}/{kind}/{name}"
        if expires < time.time() or not hmac.compare_digest(signature, signs.sign(path, file, expires)):
            raise ApiError(404, "this URL has expired, or is none of this server's: ask for another")
        return FileResponse(_existing(checkpoints.directory(path), file))

    @router.delete("/training_runs/{run}/checkpoints/{checkpoint:path}")
    async def delete(run: str, checkpoint: str, owner: str = Depends(owner_of)) -> Any:
        if checkpoint.endswith("/publish"):
            checkpoints.change(one(run, checkpoint.removesuffix("/publish"), owner), is_public=False)
        else:
            checkpoints.delete(one(run, checkpoint, owner))
        return Response(status_code=204)

    @router.post("/training_runs/{run}/checkpoints/{checkpoint:path}/publish")
    async def publish(run: str, checkpoint: str, owner: str = Depends(owner_of)) -> Any:
        checkpoints.change(one(run, checkpoint, owner), is_public=True)
        return Response(status_code=204)

    @router.put("/training_runs/{run}/checkpoints/{checkpoint:path}/ttl")
    async def ttl(request: Request, run: str, checkpoint: str, owner: str = Depends(owner_of)) -> Any:
        seconds = (await read_json(request, Ttl, limit)).ttl_seconds
        expires = None if seconds is None else time.time() + seconds
        checkpoints.change(one(run, checkpoint, owner), expires=expires)
        return Response(status_code=204)

    return router


class _Signatures:
    """Sign the URLs of files, so that who has one needs no key; a restart makes them void."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def sign(self, path: str, file: str, expires: int) -> str:
        text = f"{path}\n{file}\n{expires}".encode("utf-8", "surrogateescape")
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()


def _existing(directory: Path, file: str) -> Path:
    found = directory / file
    if not found.is_file():
        raise not_found("file", file)
    return found


def _page(limit: int, offset: int) -> tuple[int, int]:
    return max(1, min(limit, _MAX_LISTED)), max(0, min(offset, 2**31))


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _shown(service: Service, checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": checkpoint.id,
        "checkpoint_type": checkpoint.type,
        "time": _time(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": service.checkpoints.num_bytes(checkpoint),
        "public": checkpoint.is_public,
        "user_metadata": checkpoint.metadata,
        "expires_at": None if checkpoint.expires is None else _time(checkpoint.expires),
    }


def _run(service: Service, owner: str, run: str) -> dict[str, Any]:
    found = service.checkpoints.of(owner, run)
    if not found:
        raise not_found("training run", run)
    last = {each.type: _shown(service, each) for each in found}
    metadata = found[-1].run_metadata
    return {
        "training_run_id": run,
        "base_model": found[-1].base,
        "model_owner": owner,
        "is_lora": found[-1].rank > 0,
        "lora_rank": found[-1].rank or None,
        "last_request_time": _time(found[-1].created),
        "last_checkpoint": last.get("training"),
        "last_sampler_checkpoint": last.get("sampler"),
        "user_metadata": {str(name): str(value) for name, value in (metadata or {}).items()},
    }
