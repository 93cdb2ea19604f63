"""List, change, delete and hand out checkpoints: the routes of the client's RestClient."""

import datetime
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse

from coati_rl.tinker.api_error import ApiError, not_found
from coati_rl.tinker.bodies import PathBody, Ttl
from coati_rl.tinker.checkpoints import Checkpoint
from coati_rl.tinker.http_bodies import read_json
from coati_rl.tinker.service import Service

_URL_S = 3600  # that a URL of a file is good for
_MAX_LISTED = 1000


class RecordRoutes:
    """Answer for checkpoints; `prefix` is of the routes' paths."""

    def __init__(self, service: Service, *, prefix: str) -> None:
        """Answer for a service."""
        self._service, self._checkpoints, self._prefix = service, service.checkpoints, prefix
        self._signs = _Signatures()

    def router(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter()
        of_run = "/training_runs/{run}/checkpoints"
        one = of_run + "/{checkpoint:path}"
        router.get("/checkpoints")(self.all_checkpoints)
        router.get("/training_runs")(self.training_runs)
        router.get("/training_runs/{run}")(self.training_run)
        router.get(of_run)(self.checkpoints_of_run)
        router.post("/weights_info")(self.weights_info)
        router.get(one + "/external_weights_urls")(self.urls)
        router.get("/files/{expires}/{signature}/{run}/{kind}/{name}/{file:path}")(self.file)
        router.delete(one)(self.delete)
        router.post(one + "/publish")(self.publish)
        router.put(one + "/ttl")(self.ttl)
        return router

    async def all_checkpoints(self, request: Request, limit: int = 100, offset: int = 0) -> Any:
        """List an owner's checkpoints."""
        return self._listed(self._checkpoints.of(self._service.owner_of(request)), *_page(limit, offset))

    async def training_runs(self, request: Request, limit: int = 20, offset: int = 0) -> Any:
        """List the models that an owner has checkpoints of."""
        owner = self._service.owner_of(request)
        limit, offset = _page(limit, offset)
        runs = list(dict.fromkeys(each.run for each in self._checkpoints.of(owner)))
        cursor = {"offset": offset, "limit": limit, "total_count": len(runs)}
        return {"training_runs": [self._run(owner, each) for each in runs[offset : offset + limit]], "cursor": cursor}

    async def training_run(self, request: Request, run: str) -> Any:
        """Describe a model that an owner has checkpoints of."""
        return self._run(self._service.owner_of(request), run)

    async def checkpoints_of_run(self, request: Request, run: str) -> Any:
        """List the checkpoints of a model."""
        return self._listed(self._checkpoints.of(self._service.owner_of(request), run), _MAX_LISTED, 0)

    async def weights_info(self, request: Request) -> Any:
        """Say what a checkpoint is of."""
        owner = self._service.owner_of(request)
        body = await read_json(request, PathBody, self._service.limits.max_body_bytes)
        found = self._checkpoints.find(body.tinker_path, owner)
        return {"base_model": found.base, "is_lora": found.rank > 0, "lora_rank": found.rank or None, **found.flags}

    async def urls(self, request: Request, run: str, checkpoint: str) -> Any:
        """Return URLs of a checkpoint's files, which need no key."""
        found = self._one(request, run, checkpoint, may_read=True)
        expires = int(time.time()) + _URL_S
        base = f"{str(request.base_url).rstrip('/')}{self._prefix}/files"
        links = {
            name: f"{base}/{expires}/{self._signs.sign(found.path, name, expires)}/{found.run}/{found.id}/{name}"
            for name, _ in self._checkpoints.files(found)
        }
        return {"urls": links, "expires": _time(expires)}

    async def file(self, expires: int, signature: str, run: str, kind: str, name: str, file: str) -> Any:
        """Return a checkpoint's file to who has its URL."""
        path = f"tinker://{run}/{kind}/{name}"
        if expires < time.time() or not self._signs.is_of(signature, path, file, expires):
            raise ApiError(404, "this URL has expired, or is none of this server's: ask for another")
        return FileResponse(_existing(self._checkpoints.directory(path), file))

    async def delete(self, request: Request, run: str, checkpoint: str) -> Any:
        """Delete a checkpoint, or make one private again."""
        if checkpoint.endswith("/publish"):
            own = self._one(request, run, checkpoint.removesuffix("/publish"))
            self._checkpoints.change(own, is_public=False)
        else:
            self._checkpoints.delete(self._one(request, run, checkpoint))
        return Response(status_code=204)

    async def publish(self, request: Request, run: str, checkpoint: str) -> Any:
        """Let all keys read a checkpoint."""
        self._checkpoints.change(self._one(request, run, checkpoint), is_public=True)
        return Response(status_code=204)

    async def ttl(self, request: Request, run: str, checkpoint: str) -> Any:
        """Set when a checkpoint expires."""
        found = self._one(request, run, checkpoint)
        seconds = (await read_json(request, Ttl, self._service.limits.max_body_bytes)).ttl_seconds
        self._checkpoints.change(found, expires=None if seconds is None else time.time() + seconds)
        return Response(status_code=204)

    def _one(self, request: Request, run: str, checkpoint: str, *, may_read: bool = False) -> Checkpoint:
        owner = self._service.owner_of(request)
        return self._checkpoints.find(f"tinker://{run}/{checkpoint}", owner, may_read=may_read)

    def _listed(self, found: list[Checkpoint], limit: int, offset: int) -> Any:
        page = found[offset : offset + limit]
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"checkpoints": [self._shown(each) for each in page], "cursor": cursor}

    def _shown(self, checkpoint: Checkpoint) -> dict[str, Any]:
        return {
            "checkpoint_id": checkpoint.id,
            "checkpoint_type": checkpoint.type,
            "time": _time(checkpoint.created),
            "tinker_path": checkpoint.path,
            "size_bytes": self._checkpoints.num_bytes(checkpoint),
            "public": checkpoint.is_public,
            "user_metadata": _texts(checkpoint.metadata),
            "expires_at": None if checkpoint.expires is None else _time(checkpoint.expires),
        }

    def _run(self, owner: str, run: str) -> dict[str, Any]:
        found = self._checkpoints.of(owner, run)
        if not found:
            raise not_found("training run", run)
        last = {each.type: self._shown(each) for each in found}
        return {
            "training_run_id": run,
            "base_model": found[-1].base,
            "model_owner": owner,
            "is_lora": found[-1].rank > 0,
            "lora_rank": found[-1].rank or None,
            "last_request_time": _time(found[-1].created),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": _texts(found[-1].run_metadata),
        }


class _Signatures:
    """Sign the URLs of files, so that who has one needs no key; a restart makes them void."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def sign(self, path: str, file: str, expires: int) -> str:
        text = f"{path}\n{file}\n{expires}".encode("utf-8", "surrogateescape")
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()

    def is_of(self, signature: str, path: str, file: str, expires: int) -> bool:
        given = signature.encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, self.sign(path, file, expires).encode())


def _existing(directory: Path, file: str) -> Path:
    found = directory / file
    if not found.is_file():
        raise not_found("file", file)
    return found


def _page(limit: int, offset: int) -> tuple[int, int]:
    return max(1, min(limit, _MAX_LISTED)), max(0, min(offset, 2**31))


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    return None if metadata is None else {str(name): str(value) for name, value in metadata.items()}
