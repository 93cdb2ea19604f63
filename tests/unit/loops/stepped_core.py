"""Replace the fake engine's core by one that samples a token at a time, so that weights change within responses."""

import time
from dataclasses import replace

import numpy as np

from coati_rl.types import GenerationResult
from producer.engines.fake_engine import _FakeCore

_STEP_S = 0.001
_MOST_HELD = 2000  # steps, in case that no commit comes: at the end of a run


class SteppedCore(_FakeCore):
    """Give each sample a token a step; the first one of each third early lease ends only after a commit."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._open = {}  # by request: it, and for each sample its completion and the versions of its tokens so far
        self._num_held = {}  # by request: steps

    def add(self, request, stream):
        samples = [(self._complete(request, index), []) for index in range(request.num_samples)]
        self._open[request.request_id] = request, samples

    def abort(self, request_id):
        found = self._open.pop(request_id, None)
        if found is None:
            return None
        return GenerationResult(
            request_id=request_id,
            completions=tuple(
                replace(
                    completion,
                    token_ids=completion.token_ids[: len(versions)],
                    logprobs=completion.logprobs[: len(versions)],
                    policy_versions=np.array(versions, dtype=np.int32),
                    finish_reason="abort",
                )
                for completion, versions in found[1]
            ),
        )

    def num_running(self):
        return len(self._open)

    def step(self):
        time.sleep(_STEP_S)
        results = []
        for request_id, (_, samples) in [*self._open.items()]:
            for completion, versions in samples:
                num_left = len(completion.token_ids) - len(versions)
                if num_left and not (num_left == 1 and self._is_held(request_id, versions)):
                    versions.append(self.policy_version)
            if all(len(completion.token_ids) == len(versions) for completion, versions in samples):
                del self._open[request_id]
                results.append(self._result(request_id, samples))
        return results

    def _is_held(self, request_id, versions):
        """Until a commit has come; the samples of the other leases are enough for the step before it."""
        number = request_id.removeprefix("lease-")
        if number not in ("0", "3", "6", "9") or not versions or versions[0] != self.policy_version:
            return False
        self._num_held[request_id] = self._num_held.get(request_id, 0) + 1
        return self._num_held[request_id] < _MOST_HELD

    def _result(self, request_id, samples):
        completions = tuple(
            replace(completion, policy_versions=np.array(versions, dtype=np.int32)) for completion, versions in samples
        )
        return GenerationResult(request_id=request_id, completions=completions)
