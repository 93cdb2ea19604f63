"""Return the experts that vLLM has routed a request's tokens to: by vLLM's own option, or recorded in its CPU worker.

vLLM's option, `enable_return_routed_experts`, is of its second model runner, which the CPU has not. There the worker
extension binds vLLM's own hooks of routers, and says which rows of a step belong to which tokens of which request.
The beginning of a request that vLLM finds in its cache has the routes of the pass that wrote the cache: they are kept
by cache slot. A token that is computed again, with new weights or after preemption, keeps its first routes, as its
successor keeps its log-probability.

T tokens, D decoder layers, K experts of a token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coati_rl.errors import EngineError
from coati_rl.routes import route_dtype, unknown_routes
from coati_rl.types import GenerationResult


class WorkerRoutes:
    """Record the routes of a CPU worker's running requests."""

    def __init__(self, runner: Any) -> None:
        """Hook the routers and the steps of vLLM's CPUModelRunner. Raises: EngineError if their rows are unknown."""
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        groups = runner.kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise EngineError(f"--router-replay: the model has {len(groups)} kinds of caches; vLLM's routes need one")
        config = runner.model_config
        self._runner, self._block_size = runner, groups[0].kv_cache_spec.block_size
        shape = (config.get_total_num_hidden_layers(), config.get_num_experts_per_tok())
        dtype = route_dtype(config.get_num_experts())
        self._step = unknown_routes(runner.max_num_tokens, shape, dtype)
        self._slots = unknown_routes(runner.kv_cache_config.num_blocks * self._block_size, shape, dtype)
        self._routes: dict[str, list[np.ndarray]] = {}  # of running requests, each of consecutive tokens
        self._taken = set[str]()  # requests that vLLM may still be computing a token of
        bind_routed_experts_capturer(runner.model, self)
        self._execute = runner.execute_model
        runner.execute_model = self._executed

    def capture(self, layer_id: int, topk_ids: Any) -> None:
        """Take the experts of a layer for the rows of this step; vLLM calls it."""
        self._step[: len(topk_ids), layer_id] = topk_ids.numpy()

    def take(self, request_ids: Sequence[str]) -> list[np.ndarray]:
        """Return the routes of requests that have ended, uint[tokens computed, D, K] each."""
        self._taken.update(each for each in request_ids if each in self._runner.requests)
        nothing = [self._step[:0]]
        return [np.concatenate(self._routes.pop(each, nothing)) for each in request_ids]

    def _executed(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        self._taken.difference_update(scheduled.finished_req_ids)
        output = self._execute(scheduled, *arguments, **options)
        if scheduled.total_num_scheduled_tokens:
            self._record(scheduled.num_scheduled_tokens)
        return output

    def _record(self, num_scheduled: dict[str, int]) -> None:
        """Assign the rows of a step, which are in the order of the runner's batch, to requests and cache slots."""
        start = 0
        for request_id in self._runner.input_batch.req_ids:
            state, count = self._runner.requests[request_id], num_scheduled[request_id]
            rows, start = self._step[start : start + count], start + count
            first = state.num_computed_tokens
            blocks = np.asarray(state.block_ids[0])
            self._slots[self._slots_of(blocks, first, first + count)] = rows
            if request_id in self._taken:
                continue
            known = self._routes.setdefault(request_id, [])
            num_known = sum(map(len, known))
            if first > num_known:
                known.append(self._slots[self._slots_of(blocks, num_known, first)])
            known.append(rows[max(0, num_known - first) :].copy())

    def _slots_of(self, blocks: np.ndarray, start: int, end: int) -> np.ndarray:
        places = np.arange(start, end)
        slots: np.ndarray = blocks[places // self._block_size] * self._block_size + places % self._block_size
        return slots


class EngineRoutes:
    """Add routes to an engine's results."""

    def __init__(self, engine: Any, *, has_recorder: bool) -> None:
        """Take vLLM's LLMEngine. `has_recorder`: its workers have `WorkerRoutes`; else it returns routes by itself."""
        self._engine, self._has_recorder = engine, has_recorder
        self._dtype = route_dtype(engine.model_config.get_num_experts())
        self._ids: dict[str, list[str]] = {}  # of a running request, vLLM's own ones of its samples, in order
        if has_recorder:
            engine.collective_rpc("coati_record_routes")

    def expect(self, request_id: str) -> None:
        """Note the samples of a request that vLLM has just been given."""
        processor = self._engine.output_processor
        ids = processor.external_req_ids[request_id]
        self._ids[request_id] = sorted(ids, key=lambda each: processor.request_states[each].request_index)

    def added(self, result: GenerationResult) -> GenerationResult:
        """Return the result of an ended request with the routes of its completions."""
        found = self._taken(result.request_id, [each.routes for each in result.completions])
        with_routes = tuple(
            replace(each, routes=found[number % len(found)])  # of greedy samples vLLM has one
            for number, each in enumerate(result.completions)
        )
        return replace(result, completions=with_routes)

    def of_prompt(self, output: Any) -> np.ndarray | None:
        """Return the routes of the prompt of vLLM's last output of a request with one sample, uint[T, D, K]."""
        (routes,) = self._taken(output.request_id, [each.routed_experts for each in output.outputs])
        return None if routes is None else routes[: len(output.prompt_token_ids)]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the routes of requests that were aborted."""
        for each in request_ids:
            self._taken(each, [None])

    def _taken(self, request_id: str, returned: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
        """Return the routes of an ended request's samples. `returned`: those that vLLM has returned by itself."""
        ids, found = self._ids.pop(request_id), returned
        if self._has_recorder:
            found = self._engine.collective_rpc("coati_take_routes", args=(ids,))[0]  # all ranks have the same
        return [None if each is None else each.astype(self._dtype) for each in found]
