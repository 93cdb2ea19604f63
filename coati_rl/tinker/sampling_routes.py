"""Take sampling requests, and hand out the answers of all requests."""

from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from coati_rl.tinker.api_error import ApiError
from coati_rl.tinker.bodies import CreateSampler, FutureBody, Sample, SamplerBody, SamplingParams
from coati_rl.tinker.http_bodies import read_json
from coati_rl.tinker.sampling import draw_seed
from coati_rl.tinker.service import Service
from coati_rl.tinker.state import Sampler

_UNSERVED = ("topk_sample_logprobs", "prompt_alt_tokens_k", "record_stability_info", "target_prompt_logprobs")


def sampling_router(service: Service) -> APIRouter:
    """Return the routes."""
    router, sampling, limit = APIRouter(), service.sampling, service.limits.max_body_bytes

    @router.post("/create_sampling_session")
    async def create_sampling_session(request: Request, owner: str = Depends(service.owner_of)) -> Any:
        body = await read_json(request, CreateSampler, limit)
        session = service.session(body.session_id, owner)
        name = f"{session.id}:sample:{body.sampling_session_seq_id}"
        if name not in service.state.samplers:
            await service.add_sampler(_new_sampler(service, body, name, session.id, owner))
        return {"type": "create_sampling_session", "sampling_session_id": name}

    @router.post("/join_sampling_session")
    async def join(request: Request, owner: str = Depends(service.owner_of)) -> Any:
        sampler = sampling.find((await read_json(request, SamplerBody, limit)).sampling_session_id, owner)
        sampler.clients += 1
        number = sampler.clients
        await service.add_sampler(sampler)
        return {"type": "join_sampling_session", "client_counter": number}

    @router.get("/samplers/{sampler_id}")
    async def get_sampler(sampler_id: str, owner: str = Depends(service.owner_of)) -> Any:
        sampler = sampling.find(sampler_id, owner)
        return {"sampler_id": sampler.id, "base_model": sampler.base, "model_path": sampler.path}

    @router.post("/asample")
    async def asample(request: Request, owner: str = Depends(service.owner_of)) -> Any:
        body = await read_json(request, Sample, limit)
        sampler = sampling.find(body.sampling_session_id, owner)
        future = await sampling.accept(sampler, body.seq_id, _args(body))
        ids = [f"{sampler.id}:{body.seq_id}:{index}" for index in range(body.num_samples)]
        return {"request_id": future, "sample_sequence_ids": ids}

    @router.post("/retrieve_future")
    async def retrieve(request: Request, owner: str = Depends(service.owner_of)) -> Any:
        body = await read_json(request, FutureBody, limit)
        reply = await service.futures.wait(body.request_id, owner, service.limits.poll_s)
        if reply is None:  # 408 is polled again in silence; an answer "try_again" is logged as a warning each time
            waiting = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(waiting, 408)
        kind = "application/x-protobuf" if reply.is_proto else "application/json"
        return Response(reply.body, media_type=kind)

    @router.post("/cancel_future")
    async def cancel(request: Request, owner: str = Depends(service.owner_of)) -> Any:
        future = service.futures.get((await read_json(request, FutureBody, limit)).request_id)
        if future is not None and future.owner == owner and future.cancel is not None:
            future.cancel()
        return Response(status_code=204)

    return router


def _new_sampler(service: Service, body: CreateSampler, name: str, session: str, owner: str) -> Sampler:
    """Return the sampler of a base model or a checkpoint. Raises: ApiError."""
    base, directory, made_by = body.base_model, None, ""
    if body.model_path is not None:
        checkpoint = service.checkpoints.find(body.model_path, owner)
        directory = str(service.checkpoints.directory(checkpoint.path).relative_to(service.root))
        base, made_by = checkpoint.base, checkpoint.made_by
    if base is None:
        raise ApiError(400, "create_sampling_session: give base_model or model_path")
    found = service.bases.find(base).name
    return Sampler(
        id=name, owner=owner, session=session, base=found, path=body.model_path, directory=directory, made_by=made_by
    )


def _args(body: Sample) -> dict[str, Any]:
    """Return the fields of a `SampleRequest`. Raises: ApiError for what is not served."""
    for name in _UNSERVED:
        if getattr(body, name):
            raise ApiError(400, f"{name} is not served here; leave it out")
    params = body.sampling_params
    stop_ids, stop_texts = _stops(params)
    return {
        "prompt": [token for chunk in body.prompt.chunks for token in chunk.tokens],
        "num_samples": body.num_samples,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "seed": draw_seed() if params.seed is None else params.seed % 2**63,
        "stop_ids": stop_ids,
        "stop_texts": stop_texts,
        "wants_prompt_logprobs": bool(body.prompt_logprobs),
        "top_k_prompt_logprobs": body.topk_prompt_logprobs,
    }


def _stops(params: SamplingParams) -> tuple[list[int] | None, list[str]]:
    """Return stop tokens and texts: by none of them a sample ends at the model's end tokens."""
    if params.stop is None:
        return None, []
    stops = [params.stop] if isinstance(params.stop, str) else params.stop
    return [each for each in stops if isinstance(each, int)], [each for each in stops if isinstance(each, str)]
