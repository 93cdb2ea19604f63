"""Answer what a client asks before it computes: settings, sessions, heartbeats."""

from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from coati_rl.tinker.bases import Base
from coati_rl.tinker.bodies import CreateSession, SessionBody
from coati_rl.tinker.http_bodies import read_body, read_json
from coati_rl.tinker.service import Service

_REFRESH_S = 300
_MAX_DISCARDED = 2**24  # bytes of telemetry, which is not kept

_CLIENT_FLAGS = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": False,
}


def session_router(service: Service) -> APIRouter:
    """Return the routes."""
    router, limit = APIRouter(), service.limits.max_body_bytes

    @router.get("/healthz")
    async def healthz() -> Any:
        return {"status": "ok"}

    @router.get("/get_server_capabilities", dependencies=[Depends(service.owner_of)])
    async def capabilities() -> Any:
        return {"supported_models": [_described(base) for base in service.bases.by_name.values()]}

    @router.post("/client/config")
    async def config() -> Any:
        return _CLIENT_FLAGS

    @router.post("/client/dynamic_config")
    async def dynamic_config() -> Any:
        return {"refresh_interval_sec": _REFRESH_S, "sample_cancel_enabled": True}

    @router.post("/telemetry", dependencies=[Depends(service.owner_of)])
    async def telemetry(request: Request) -> Any:
        await read_body(request, _MAX_DISCARDED)
        return {"status": "accepted"}

    @router.post("/create_session")
    async def create_session(request: Request, owner: str = Depends(service.owner_of)) -> Any:
        body = await read_json(request, CreateSession, limit)
        session = await service.add_session(owner, body.user_metadata, body.display_name)
        return {"type": "create_session", "session_id": session.id}

    @router.post("/session_heartbeat")
    async def heartbeat(request: Request, owner: str = Depends(service.owner_of)) -> Any:
        service.beat((await read_json(request, SessionBody, limit)).session_id, owner)
        return {"type": "session_heartbeat"}

    @router.post("/sessions/{session_id}/finish")
    async def finish(session_id: str, owner: str = Depends(service.owner_of)) -> Any:
        service.end_session(service.session(session_id, owner))
        return Response(status_code=204)

    @router.get("/sessions")
    async def sessions(owner: str = Depends(service.owner_of)) -> Any:
        return {"sessions": [each.id for each in service.state.sessions.values() if each.owner == owner]}

    @router.get("/sessions/{session_id}")
    async def session(session_id: str, owner: str = Depends(service.owner_of)) -> Any:
        found = service.session(session_id, owner)
        samplers = [each.id for each in service.state.samplers.values() if each.session == found.id]
        return {
            "training_run_ids": [each.id for each in service.models_of(found)],
            "sampler_ids": samplers,
            "user_metadata": found.metadata,
            "display_name": found.display_name,
        }

    return router


def _described(base: Base) -> dict[str, Any]:
    limit = base.training.max_tokens
    return {"model_name": base.name, "max_context_length": limit, "trainable": True, "sampleable": True}
