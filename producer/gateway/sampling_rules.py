"""Decide how a request is sampled: what the client asks for, within what can be trained."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coati_rl.config.sampling import temperature_problem
from coati_rl.types import CUTS, SamplingParams
from producer.gateway.api_error import ApiError
from producer.gateway.requests import CONSTRAINED, SampledRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRules:
    """Hold what a request is sampled with where it asks for nothing else.

    Where the tokens are trained, the objective divides the logits by the temperature of each token and takes the
    softmax over all tokens. So the temperature is the client's choice, unless it is 0; another top-p, top-k or min-p
    than the run's is not, unless trainers compute the log-probabilities of the sampling policy themselves. A
    temperature that the engine does not sample at is refused in any case.
    """

    sampling: SamplingParams
    is_trained: bool = False
    no_schema: str = f"it needs {CONSTRAINED}; ask for the form in the prompt"  # why none is taken; empty: any is
    may_renormalise: bool = True  # the engine's log-probabilities may be of a part of the vocabulary
    loras: Mapping[str, str] = field(default_factory=dict)  # the engine's names of adapters by the request's model
    seed_scope: str = ""  # a client's seed stands for different numbers under different scopes

    def changes(self, request: SampledRequest) -> dict[str, Any]:
        """Return what differs from `sampling` for a request, by field name of `SamplingParams`, `json_schema`, `lora`.

        Raises: ApiError(400) for a setting that cannot be trained.
        """
        own, found = self.sampling, self._form(request) | self._adapter(request)
        if request.temperature is not None:
            if self.is_trained and request.temperature == 0:
                raise _refusal("temperature", "0 is greedy, which has no distribution to train; leave it out")
            if problem := temperature_problem(request.temperature):
                raise _refusal("temperature", f"{request.temperature:g} {problem}")
            found["temperature"] = request.temperature
        if request.top_p is not None:
            found["top_p"] = request.top_p
        if request.top_k is not None:
            found["top_k"] = request.top_k if request.top_k > 0 else None
        if request.min_p is not None:
            found["min_p"] = request.min_p
        for name in CUTS:
            if not self.may_renormalise and found.get(name, getattr(own, name)) != getattr(own, name):
                remedy = f"the run's is {getattr(own, name)}; leave it out, or train with --old-logprobs trainer"
                raise _refusal(name, f"{found[name]}: {remedy}")
        if request.token_limit is not None:
            found["max_new_tokens"] = min(request.token_limit, own.max_new_tokens)
        if request.stop:
            found["stop"] = tuple(dict.fromkeys((*own.stop, *request.stop)))
        if request.seed is not None:
            found["seed"] = self._seed(request.seed)
        return found

    def _adapter(self, request: SampledRequest) -> dict[str, Any]:
        """Return the `lora` of an `EngineSample`, if the request's model is an adapter."""
        lora = self.loras.get(request.model)
        return {} if lora is None else {"lora": lora}

    def _form(self, request: SampledRequest) -> dict[str, Any]:
        """Return the `json_schema` of an `EngineSample`, if the request asks for a form."""
        if (schema := request.response_format.schema_text) is None:
            return {}
        if self.no_schema:
            raise _refusal("response_format", f"is not supported: {self.no_schema}")
        return {"json_schema": schema}

    def _seed(self, seed: int) -> int:
        """Return the engine's seed: 48 bits, as sample i of a request uses seed + i."""
        digest = hashlib.blake2b(f"{self.seed_scope}/{seed}".encode(), digest_size=6).digest()
        return int.from_bytes(digest, "big")


def _refusal(name: str, message: str) -> ApiError:
    return ApiError(400, f"{name}: {message}", param=name, code="unsupported_value")
