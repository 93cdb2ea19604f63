"""Make the calls of an engine to a vLLM server: /inference/v1/generate, and those of its development mode."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from coati_rl.errors import EngineError
from coati_rl.http_call import CallRefusedError
from coati_rl.types import GenerationRequest
from producer.engines.served.calls import LOAD_S, SHORT_S
from producer.engines.served.replies import ReplyError, num_choices
from producer.engines.served.server import Server

_REQUEST_PREFIX = "generate-tokens-"  # that the server puts before the ids of requests
_BYTES_OF_TOKEN = 512  # 200 were seen
_KEY = re.compile(r"dp\d+:pp\d+:pcp\d+:tp\d+:")


class VllmCalls:
    """Implement `ServerCalls` for vLLM."""

    health_path = "/health"
    generate_path = "/inference/v1/generate"

    def __init__(self, server: Server) -> None:
        self._server = server

    def begin(self, version: str) -> None:
        self.name(version)
        self._server.post("/resume", timeout_s=SHORT_S)

    def name(self, version: str) -> None:
        self._server.post("/update_weight_version", {"new_version": version}, timeout_s=SHORT_S)

    def generate_body(self, request: GenerationRequest, request_id: str, *, max_new_tokens: int) -> dict[str, Any]:
        sampling = request.sampling
        params: dict[str, Any] = {
            "n": num_choices(request),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "max_tokens": max_new_tokens,
            "stop": list(sampling.stop) or None,
            "seed": sampling.seed,  # sample i gets seed + i
            "logprobs": 0,  # of the sampled token alone
            "detokenize": bool(sampling.stop),
            "include_stop_str_in_output": True,
        }
        if request.json_schema:
            params["structured_outputs"] = {"json": request.json_schema}
        return {"request_id": request_id, "token_ids": list(request.token_ids), "sampling_params": params}

    def bytes_of_token(self, request: GenerationRequest) -> int:
        return _BYTES_OF_TOKEN

    def choices(self, reply: dict[str, Any], request: GenerationRequest) -> list[Any]:
        choices = reply.get("choices")
        if not isinstance(choices, list):
            raise ReplyError("a reply without samples")
        return choices

    def abort(self, request_id: str, num_choices: int, *, timeout_s: float) -> None:
        body = {"request_ids": [_REQUEST_PREFIX + request_id]}
        self._server.post("/inference/v1/abort_requests", body, timeout_s=timeout_s)

    def probe_body(self, token_ids: Sequence[int], request_id: str) -> dict[str, Any]:
        params = {
            "n": 1,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "detokenize": False,
            "skip_reading_prefix_cache": True,
        }
        return {"request_id": request_id, "token_ids": list(token_ids), "sampling_params": params}

    def prompt_logprobs(self, reply: dict[str, Any], token_ids: Sequence[int]) -> np.ndarray:
        found = reply.get("prompt_logprobs")
        if not isinstance(found, list) or len(found) != len(token_ids):
            raise ReplyError(f"no log-probabilities of a prompt of {len(token_ids)} tokens")
        try:
            rows = zip(found[1:], token_ids[1:], strict=True)
            return np.asarray([float(each[str(token)]["logprob"]) for each, token in rows], dtype=np.float32)
        except (KeyError, TypeError, ValueError) as error:
            raise ReplyError("log-probabilities of other tokens than the prompt's") from error

    def pause(self) -> None:
        self._server.post("/pause?mode=keep", timeout_s=SHORT_S)

    def reload(self, directory: str, version: str) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        self._server.post("/collective_rpc", call, timeout_s=LOAD_S)
        self.name(version)

    def checksums(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        reply = self._server.post("/weight_checker", {"action": "checksum"}, timeout_s=LOAD_S).get("checksums")
        if not isinstance(reply, dict):
            raise CallRefusedError("/weight_checker answered no checksums")
        for key, digest in reply.items():
            found.setdefault(_KEY.sub("", str(key), count=1), set()).add(str(digest))
        return found

    def resume(self) -> None:
        reset = self._server.post("/reset_prefix_cache?reset_running_requests=true", timeout_s=SHORT_S)
        if reset.get("success") is not True:
            raise EngineError(f"{self._server.url} has not reset its prefix cache after the update")
        self._server.post("/resume", timeout_s=SHORT_S)
