"""Take the requests of models: their creation, losses, steps, checkpoints."""

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from coati_rl.tinker.api_error import ApiError
from coati_rl.tinker.bodies import CreateModel, Load, ModelBody, OptimStep, Ordered, Save, SaveForSampler
from coati_rl.tinker.checkpoints import SAMPLER, TRAINING
from coati_rl.tinker.core import RequestError
from coati_rl.tinker.http_bodies import Kind, parse_json, read_body, read_json
from coati_rl.tinker.service import Service
from coati_rl.tinker.state import CREATE, LOAD, LOSS, PUBLISH, REFUSED, SAVE, STEP, Model
from coati_rl.tinker.wire import read_forward_backward, read_place

ArgsOf = Callable[[Kind], Mapping[str, Any]]
_PROTOBUF = "application/x-protobuf"
_OLD_CLIENT = "this server speaks the protobuf of tinker 0.25 and newer: pip install --upgrade tinker"


class TrainingRoutes:
    """Answer the requests of models."""

    def __init__(self, service: Service) -> None:
        """Answer for a service."""
        self._service, self._training = service, service.training
        self._limit = service.limits.max_body_bytes

    def router(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter()
        router.post("/create_model")(self.create_model)
        router.post("/get_info")(self.get_info)
        router.post("/forward_backward")(self.forward_backward)
        router.post("/forward")(self.forward)
        router.post("/optim_step")(self.optim_step)
        router.post("/save_weights")(self.save_weights)
        router.post("/save_weights_for_sampler")(self.save_for_sampler)
        router.post("/load_weights")(self.load_weights)
        return router

    async def create_model(self, request: Request) -> Any:
        """Create a model with new adapters."""
        owner = self._service.owner_of(request)
        body = await read_json(request, CreateModel, self._limit)
        _check_optimizer(body)
        if body.lora_config is None:
            raise ApiError(400, "lora_config is missing: give a rank, or 0 to train all weights")
        model = self._new_model(owner, body.session_id, body.model_seq_id, body.base_model, body.user_metadata)
        args = body.lora_config.model_dump()
        args["seed"] = secrets.randbits(31) if args["seed"] is None else args["seed"]
        return _answer(model, await self._training.create(model, CREATE, args))

    async def get_info(self, request: Request) -> Any:
        """Describe a model."""
        owner = self._service.owner_of(request)
        model = self._training.find((await read_json(request, ModelBody, self._limit)).model_id, owner)
        base = self._service.bases.find(model.base)
        data = {"arch": base.arch, "model_name": base.name, "tokenizer_id": str(base.directory.absolute())}
        return {
            "type": "get_info",
            "model_id": model.id,
            "is_lora": model.rank > 0,
            "lora_rank": model.rank or None,
            "model_name": base.name,
            "model_data": data,
        }

    async def forward_backward(self, request: Request) -> Any:
        """Compute a loss, and its gradient."""
        owner = self._service.owner_of(request)
        if request.headers.get("content-type", "").partition(";")[0] != _PROTOBUF:
            raise ApiError(400, _OLD_CLIENT)
        body = await read_body(request, self._limit)
        name, seq = read_place(body)
        model = self._training.find(name, owner)
        try:
            loss, _ = await run_in_threadpool(read_forward_backward, body)
        except RequestError as error:
            return _answer(model, await self._training.accept(model, seq, REFUSED, {"message": str(error)}))
        args = {"is_forward_only": loss.is_forward_only}
        return _answer(model, await self._training.accept(model, seq, LOSS, args, body, loss))

    async def forward(self) -> Any:
        """Refuse what clients before 0.25 send."""
        raise ApiError(400, _OLD_CLIENT)

    async def optim_step(self, request: Request) -> Any:
        """Take a step."""
        return await self._ordered(request, OptimStep, STEP, _adam_args)

    async def save_weights(self, request: Request) -> Any:
        """Save a checkpoint that training goes on from."""
        return await self._ordered(request, Save, SAVE, partial(self._save_args, kind=TRAINING))

    async def save_for_sampler(self, request: Request) -> Any:
        """Save a checkpoint to sample from, or make a sampler of the weights as they are."""
        return await self._ordered(request, SaveForSampler, SAVE, self._sampler_args)

    async def load_weights(self, request: Request) -> Any:
        """Load a checkpoint into a model, or a new one."""
        owner = self._service.owner_of(request)
        body = await read_json(request, Load, self._limit)
        if body.model_id is not None and body.seq_id is not None:
            return await self._load_into(self._training.find(body.model_id, owner), body, body.seq_id)
        if body.session_id is None or body.model_seq_id is None:
            raise ApiError(400, "load_weights: give session_id and model_seq_id, or model_id and seq_id")
        base, args = self._load_args(body, owner)
        if body.base_model not in (None, base):
            raise ApiError(400, f"base_model {body.base_model!r}: the checkpoint is of {base!r}")
        model = self._new_model(owner, body.session_id, body.model_seq_id, base, body.user_metadata)
        return _answer(model, await self._training.create(model, LOAD, args))

    async def _load_into(self, model: Model, body: Load, seq: int) -> Any:
        op, args = LOAD, dict[str, Any]()
        try:
            base, args = self._load_args(body, model.owner)
            if base != model.base:
                raise RequestError(f"{body.path} is of another base model than {model.base}, which {model.id} has")
        except (ApiError, RequestError) as error:
            op, args = REFUSED, {"message": str(error)}
        return _answer(model, await self._training.accept(model, seq, op, args))

    async def _ordered(self, request: Request, kind: type[Kind], op: str, args_of: ArgsOf[Kind]) -> Any:
        """Take a request in JSON. A wrong one takes its place in line, too, as its client counts it."""
        owner, data = self._service.owner_of(request), await read_body(request, self._limit)
        place = parse_json(data, Ordered)
        model = self._training.find(place.model_id, owner)
        try:
            args = args_of(parse_json(data, kind))
        except (ApiError, RequestError, ValidationError) as error:
            op, args = REFUSED, {"message": _message(error)}
        op = PUBLISH if "sampler" in args else op
        return _answer(model, await self._training.accept(model, place.seq_id, op, args))

    def _new_model(self, owner: str, session: str, number: int, base: str, metadata: Any) -> Model:
        found = self._service.session(session, owner)
        base_name = self._service.bases.find(base).name
        return Model(id=f"{found.id}:train:{number}", owner=owner, session=found.id, base=base_name, metadata=metadata)

    def _save_args(self, body: Save, *, kind: str) -> Mapping[str, Any]:
        name = body.path if body.path is not None else f"step-{body.seq_id}"
        self._service.checkpoints.directory(f"tinker://{body.model_id}/{kind}/{name}")
        return {
            "kind": kind,
            "name": name,
            "overwrite": body.overwrite,
            "ttl_seconds": body.ttl_seconds,
            "user_metadata": body.user_metadata,
        }

    def _sampler_args(self, body: SaveForSampler) -> Mapping[str, Any]:
        if body.path is not None:
            return self._save_args(body, kind=SAMPLER)
        session, number = body.model_id.partition(":train:")[0], body.sampling_session_seq_id
        name = f"{body.model_id}:sample:{body.seq_id}" if number is None else f"{session}:sample:{number}"
        return {"sampler": name, "is_inflight": body.kind == "inflight"}

    def _load_args(self, body: Load, owner: str) -> tuple[str, dict[str, Any]]:
        """Return a checkpoint's base model, and the arguments of loading it. Raises: ApiError, RequestError."""
        checkpoint = self._service.checkpoints.find(body.path, owner)
        if body.optimizer and not checkpoint.has_optimizer:
            raise RequestError(f"{body.path} has no optimizer state; load it without, or one of save_state")
        return checkpoint.base, {
            "path": checkpoint.path,
            "optimizer": body.optimizer,
            "rank": checkpoint.rank,
            "flags": dict(checkpoint.flags),
        }


def _answer(model: Model, future: str) -> dict[str, Any]:
    return {"request_id": future, "model_id": model.id}


def _check_optimizer(body: CreateModel) -> None:
    if body.optimizer_config is not None and body.optimizer_config.type != "adamw":
        raise ApiError(400, f"optimizer_config: {body.optimizer_config.type[:40]!r} is not served; use adamw")


def _adam_args(body: OptimStep) -> Mapping[str, Any]:
    if body.adam_params is None:
        raise RequestError("optim_step: give types.AdamParams; other optimizers are not served")
    return body.adam_params.model_dump()


def _message(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False)[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"[:1000]
    return str(error)
