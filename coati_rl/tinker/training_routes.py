"""Take the requests of models: their creation, losses, steps, checkpoints."""

import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from coati_rl.tinker.api_error import ApiError
from coati_rl.tinker.bodies import CreateModel, Load, ModelBody, OptimStep, Ordered, Save, SaveForSampler
from coati_rl.tinker.checkpoints import SAMPLER, TRAINING
from coati_rl.tinker.core import RequestError
from coati_rl.tinker.http_bodies import Kind, parse_json, parse_or_none, read_body, read_json
from coati_rl.tinker.service import Service
from coati_rl.tinker.state import CREATE, LOAD, LOSS, PUBLISH, REFUSED, SAVE, STEP, Model
from coati_rl.tinker.wire import read_forward_backward, read_place

Owner = Callable[[Request], Awaitable[str]]
_PROTOBUF = "application/x-protobuf"
_OLD_CLIENT = "this server speaks the protobuf of tinker 0.25 and newer: pip install --upgrade tinker"


def training_router(service: Service, owner_of: Owner) -> APIRouter:
    """Return the routes."""
    router, training, limit = APIRouter(), service.training, service.limits.max_body_bytes

    def answer(model: Model, future: str) -> Any:
        return {"request_id": future, "model_id": model.id}

    def new_model(owner: str, session: str, number: int, base: str, metadata: Any) -> Model:
        found = service.session(session, owner)
        base_name = service.bases.find(base).name
        return Model(
            id=f"{found.id}:train:{number}", owner=owner, session=found.id, base=base_name, metadata=metadata
        )

    async def ordered(data: bytes, owner: str, kind: type[Kind], op: str, args_of: Callable[[Kind], Any]) -> Any:
        """Take a request in JSON. A wrong one takes its place in line, too, as its client counts it."""
        place = parse_json(data, Ordered)
        model = training.find(place.model_id, owner)
        try:
            args = args_of(parse_json(data, kind))
        except (ApiError, RequestError, ValidationError) as error:
            op, args = REFUSED, {"message": _message(error)}
        return answer(model, await training.accept(model, place.seq_id, op, args))

    @router.post("/create_model")
    async def create_model(request: Request, owner: str = Depends(owner_of)) -> Any:
        body = await read_json(request, CreateModel, limit)
        _check_optimizer(body)
        if body.lora_config is None:
            raise ApiError(400, "lora_config is missing: give a rank, or 0 to train all weights")
        model = new_model(owner, body.session_id, body.model_seq_id, body.base_model, body.user_metadata)
        args = body.lora_config.model_dump()
        args["seed"] = secrets.randbits(31) if args["seed"] is None else args["seed"]
        return answer(model, await training.create(model, CREATE, args))

    @router.post("/get_info")
    async def get_info(request: Request, owner: str = Depends(owner_of)) -> Any:
        model = training.find((await read_json(request, ModelBody, limit)).model_id, owner)
        base = service.bases.find(model.base)
        data = {"arch": base.arch, "model_name": base.name, "tokenizer_id": str(base.directory.absolute())}
        return {
            "type": "get_info",
            "model_id": model.id,
            "is_lora": model.rank > 0,
            "lora_rank": model.rank or None,
            "model_name": base.name,
            "model_data": data,
        }

    @router.post("/forward_backward")
    async def forward_backward(request: Request, owner: str = Depends(owner_of)) -> Any:
        if request.headers.get("content-type", "").partition(";")[0] != _PROTOBUF:
            raise ApiError(400, _OLD_CLIENT)
        body = await read_body(request, limit)
        name, seq = read_place(body)
        model = training.find(name, owner)
        try:
            loss, _ = await run_in_threadpool(read_forward_backward, body)
        except RequestError as error:
            return answer(model, await training.accept(model, seq, REFUSED, {"message": str(error)}))
        args = {"is_forward_only": loss.is_forward_only}
        return answer(model, await training.accept(model, seq, LOSS, args, body, loss))

    @router.post("/forward")
    async def forward() -> Any:
        raise ApiError(400, _OLD_CLIENT)

    @router.post("/optim_step")
    async def optim_step(request: Request, owner: str = Depends(owner_of)) -> Any:
        return await ordered(await read_body(request, limit), owner, OptimStep, STEP, _adam_args)

    @router.post("/save_weights")
    async def save_weights(request: Request, owner: str = Depends(owner_of)) -> Any:
        data = await read_body(request, limit)
        return await ordered(data, owner, Save, SAVE, lambda body: _save_args(service, body, TRAINING))

    @router.post("/save_weights_for_sampler")
    async def save_for_sampler(request: Request, owner: str = Depends(owner_of)) -> Any:
        data = await read_body(request, limit)
        body = parse_or_none(data, SaveForSampler)
        if body is None or body.path is not None:
            return await ordered(data, owner, SaveForSampler, SAVE, lambda each: _save_args(service, each, SAMPLER))
        model = training.find(body.model_id, owner)
        number = f"{model.session}:sample:{body.sampling_session_seq_id}"
        if body.sampling_session_seq_id is None:
            number = f"{model.id}:sample:{body.seq_id}"
        args = {"sampler": number, "is_inflight": body.kind == "inflight"}
        return answer(model, await training.accept(model, body.seq_id, PUBLISH, args))

    @router.post("/load_weights")
    async def load_weights(request: Request, owner: str = Depends(owner_of)) -> Any:
        body = await read_json(request, Load, limit)
        if body.model_id is not None and body.seq_id is not None:
            model = training.find(body.model_id, owner)
            try:
                op, args = LOAD, _load_args(service, body, owner)
                if args.pop("base") != model.base:
                    raise RequestError(f"{body.path} is of another base model than {model.id}, which is of {model.base}")
            except (ApiError, RequestError) as error:
                op, args = REFUSED, {"message": _message(error)}
            return answer(model, await training.accept(model, body.seq_id, op, args))
        if body.session_id is None or body.model_seq_id is None:
            raise ApiError(400, "load_weights: give session_id and model_seq_id, or model_id and seq_id")
        args = _load_args(service, body, owner)
        base = args.pop("base")
        if body.base_model not in (None, base):
            raise ApiError(400, f"base_model {body.base_model!r}: the checkpoint is of {base!r}")
        model = new_model(owner, body.session_id, body.model_seq_id, base, body.user_metadata)
        return answer(model, await training.create(model, LOAD, args))

    return router


def _check_optimizer(body: CreateModel) -> None:
    if body.optimizer_config is not None and body.optimizer_config.type != "adamw":
        raise ApiError(400, f"optimizer_config: {body.optimizer_config.type[:40]!r} is not served; use adamw")


def _adam_args(body: OptimStep) -> Mapping[str, Any]:
    if body.adam_params is None:
        raise RequestError("optim_step: give types.AdamParams; other optimizers are not served")
    return body.adam_params.model_dump()


def _save_args(service: Service, body: Save, kind: str) -> Mapping[str, Any]:
    name = body.path if body.path is not None else f"step-{body.seq_id}"
    service.checkpoints.directory(f"tinker://{body.model_id}/{kind}/{name}")
    return {
        "kind": kind,
        "name": name,
        "overwrite": body.overwrite,
        "ttl_seconds": body.ttl_seconds,
        "user_metadata": body.user_metadata,
    }


def _load_args(service: Service, body: Load, owner: str) -> dict[str, Any]:
    checkpoint = service.checkpoints.find(body.path, owner)
    if body.optimizer and not checkpoint.has_optimizer:
        raise RequestError(f"{body.path} has no optimizer state; load it without, or one of save_state")
    return {
        "path": checkpoint.path,
        "optimizer": body.optimizer,
        "base": checkpoint.base,
        "rank": checkpoint.rank,
        "flags": dict(checkpoint.flags),
    }


def _message(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False)[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"[:1000]
    return str(error)
