"""Make the calls of an engine to an SGLang server: /generate, /update_weights_from_disk and those around it.

The log-probability that SGLang returns of a sampled token is of the distribution after temperature and penalties, but
before top-k, top-p and min-p. Under these the tokens that could be sampled are asked for as well, with whom comes the
log-probability among them (`return_sampling_mask`).
"""

from collections.abc import Sequence
from random import getrandbits
from typing import Any

import numpy as np

from coati_rl.http_call import CallRefusedError
from coati_rl.types import GenerationRequest
from producer.engines.admission import RequestRefusedError
from producer.engines.served.calls import LOAD_S, SHORT_S
from producer.engines.served.replies import ReplyError, num_choices
from producer.engines.served.server import Server

_BYTES_OF_TOKEN = 128  # 70 were seen
_BYTES_OF_ID = 8
_MAX_TOP_K = 4096  # --sampling-mask-max-tokens by default
_ALL = -1  # for top_k
_SEED_BITS = 62
_UNNAMED = 0  # what it calls the last token of the vocabulary in a prompt


class SglangCalls:
    """Implement `ServerCalls` for SGLang."""

    health_path = "/ping"  # /health samples a token, which a paused server does not
    generate_path = "/generate"

    def __init__(self, server: Server, *, has_seeds: bool) -> None:
        self._server, self._has_seeds = server, has_seeds

    def begin(self, version: str) -> None:
        """See `ServerCalls`; requests of others end here."""
        self.name(version)
        self.resume()

    def name(self, version: str) -> None:
        self._server.post("/update_weight_version", {"new_version": version}, timeout_s=SHORT_S)

    def generate_body(self, request: GenerationRequest, request_id: str, *, max_new_tokens: int) -> dict[str, Any]:
        sampling, num_samples = request.sampling, num_choices(request)
        self._check(request)
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or _ALL,
            "min_p": sampling.min_p,
            "max_new_tokens": max_new_tokens,
            "stop": list(sampling.stop) or None,
            "json_schema": request.json_schema,
        }
        # Without a seed SGLang would give every sample the same one.
        seed = getrandbits(_SEED_BITS) if sampling.seed is None else sampling.seed
        return {
            "rid": _ids(request_id, num_samples),
            "input_ids": [list(request.token_ids)] * num_samples,
            "sampling_params": [{**params, "sampling_seed": seed + i} for i in range(num_samples)],
            "return_logprob": True,
            "return_sampling_mask": _is_cut(request),
        }

    def _check(self, request: GenerationRequest) -> None:
        """Raise RequestRefusedError for sampling that this server cannot do, or not tell the log-probabilities of."""
        sampling = request.sampling
        if _is_cut(request) and not 1 <= (sampling.top_k or 0) <= _MAX_TOP_K:
            raise RequestRefusedError(
                f"top_k {sampling.top_k}, top_p {sampling.top_p}, min_p {sampling.min_p}: SGLang tells the "
                f"log-probabilities among the tokens that are left with a top_k up to {_MAX_TOP_K} alone; set one"
            )
        if sampling.min_p and self._has_seeds:  # an assertion of its sampler would end the server
            raise RequestRefusedError(
                f"min_p {sampling.min_p}: SGLang has none with seeds; start it without --enable-deterministic-inference"
            )
        if sampling.repetition_penalty != 1.0:
            raise RequestRefusedError(
                f"repetition_penalty {sampling.repetition_penalty}: SGLang's leaves out the prompt's tokens; use 1"
            )

    def bytes_of_token(self, request: GenerationRequest) -> int:
        return _BYTES_OF_TOKEN + _BYTES_OF_ID * (request.sampling.top_k or 0)

    def choices(self, reply: dict[str, Any], request: GenerationRequest) -> list[Any]:
        try:
            return [_choice(index, each, _is_cut(request)) for index, each in enumerate(reply["items"])]
        except (LookupError, TypeError, ValueError) as error:
            raise ReplyError("a reply without tokens and log-probabilities") from error

    def abort(self, request_id: str, num_choices: int, *, timeout_s: float) -> None:
        for each in _ids(request_id, num_choices):
            self._server.post("/abort_request", {"rid": each}, timeout_s=timeout_s)

    def probe_body(self, token_ids: Sequence[int], request_id: str) -> dict[str, Any]:
        return {
            "rid": request_id,
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,  # from where on nothing is taken from the prefix cache
        }

    def prompt_logprobs(self, reply: dict[str, Any], token_ids: Sequence[int]) -> np.ndarray:
        try:
            rows = reply["meta_info"]["input_token_logprobs"]
            if any(row[1] not in (token, _UNNAMED) for row, token in zip(rows, token_ids, strict=True)):
                raise ReplyError("log-probabilities of other tokens than the prompt's")
            return np.asarray([float(row[0]) for row in rows[1:]], dtype=np.float32)
        except (LookupError, TypeError, ValueError) as error:
            raise ReplyError(f"no log-probabilities of a prompt of {len(token_ids)} tokens") from error

    def pause(self) -> None:
        """See `ServerCalls`; what is computed of running requests is dropped, and computed again with other weights."""
        self._server.post("/pause_generation", {"mode": "retract"}, timeout_s=SHORT_S)

    def reload(self, directory: str, version: str) -> None:
        """See `ServerCalls`; SGLang refuses the call if it cannot flush its prefix cache."""
        call = {"model_path": directory, "load_format": "safetensors", "weight_version": version, "flush_cache": True}
        self._server.post("/update_weights_from_disk", call, timeout_s=LOAD_S)

    def checksums(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        ranks = self._server.post("/weights_checker", {"action": "checksum"}, timeout_s=LOAD_S).get("ranks")
        try:
            for name, digest in (item for rank in ranks or () for item in rank["checksums"].items()):
                found.setdefault(str(name), set()).add(str(digest))
        except (LookupError, TypeError, AttributeError):
            raise CallRefusedError("/weights_checker answered no checksums") from None
        return found

    def resume(self) -> None:
        self._server.post("/continue_generation", {"torch_empty_cache": False}, timeout_s=SHORT_S)


def _ids(request_id: str, num_samples: int) -> list[str]:
    """Return the ids of a request's samples, none of which begins another: SGLang aborts all that begin with an id."""
    return [f"{request_id}-{i}." for i in range(num_samples)]


def _is_cut(request: GenerationRequest) -> bool:
    """Return whether tokens are left out of the distribution that is sampled from."""
    sampling = request.sampling
    return sampling.temperature > 0.0 and (sampling.top_k is not None or sampling.top_p < 1.0 or sampling.min_p > 0.0)


def _choice(index: int, answer: Any, is_cut: bool) -> dict[str, Any]:
    """Return a sample in vLLM's form, unchecked. Raises: LookupError, TypeError, ValueError."""
    meta = answer["meta_info"]
    tokens = meta["output_token_logprobs"]
    logprobs = meta["output_token_sampling_logprobs"] if is_cut else [token[0] for token in tokens]
    content = [{"token_id": each[1], "logprob": value} for each, value in zip(tokens, logprobs, strict=True)]
    return {
        "index": index,
        "finish_reason": meta["finish_reason"]["type"],
        "token_ids": answer["output_ids"],
        "weight_versions": meta.get("weight_versions"),
        "logprobs": {"content": content},
    }
