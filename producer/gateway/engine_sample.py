"""Ask an engine for samples on behalf of a client without an episode."""

import asyncio
import secrets
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from coati_rl.errors import ContextLengthError, RolloutError
from coati_rl.protocols import GenerationEngine, OnTokens
from coati_rl.types import Completion, GenerationRequest, SamplingParams
from producer.environments.step_sampling import with_step_sampling
from producer.gateway.api_error import ApiError


class EngineSample:
    """Implement `Sample` with requests of their own, each with a seed at random unless the client gives one.

    Raises: ApiError(400), too, for a schema that the engine cannot constrain answers to.
    """

    def __init__(self, engine: GenerationEngine, sampling: SamplingParams) -> None:
        self._engine = engine
        self._sampling = sampling

    async def __call__(
        self, token_ids: Sequence[int], *, num_samples: int, sampling: Mapping[str, Any], on_tokens: OnTokens | None
    ) -> tuple[Completion, ...]:
        changes = dict(sampling)
        schema, lora = changes.pop("json_schema", None), changes.pop("lora", None)
        own = replace(self._sampling, seed=secrets.randbits(48))
        request = GenerationRequest(
            request_id=f"api-{uuid.uuid4().hex}",
            token_ids=tuple(token_ids),
            num_samples=num_samples,
            sampling=with_step_sampling(own, changes),
            json_schema=schema,
            lora=lora,
        )
        loop, answered = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(answered.set)

        future = self._engine.submit(request, on_tokens)
        future.add_done_callback(wake)
        try:
            await answered.wait()
        except asyncio.CancelledError:
            self._engine.abort(request.request_id)  # nobody waits for it any more
            raise
        result = future.result()
        if result.error is not None:
            if schema is not None and not result.is_too_long:
                message = f"response_format: the engine refuses the schema: {result.error}"
                raise ApiError(400, message, param="response_format", code="invalid_value")
            raise (ContextLengthError if result.is_too_long else RolloutError)(result.error)
        return result.completions
