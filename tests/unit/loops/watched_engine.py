"""Replace parts of a producer in a threaded run: an engine that records and fails, a reward without workers."""

from concurrent.futures import Future

import numpy as np

from coati_rl.errors import RunError
from coati_rl.model_files.identity import weights_identity
from coati_rl.types import GenerationResult


class WatchedEngine:
    """An engine that notes what it is asked for, and fails when told to."""

    def __init__(
        self,
        engine,
        settings,
        *,
        dies_at_request=None,
        fails=(),
        logprob_scale=1.0,
        logprob_error=(0.0,),
        scales_after_commit=0,
        forgets_to_commit=False,
    ):
        self._engine = engine
        self._dies_at_request = dies_at_request
        self._fails = fails  # text of prompts that it cannot answer
        self._logprob_scale = logprob_scale
        self._logprob_error = logprob_error  # nats, added to a response's tokens in turn
        self._scales_after_commit = scales_after_commit  # of this number, from 1; 0: from the start
        self._forgets_to_commit = forgets_to_commit  # after its first one
        self.settings = settings
        self.requests = []
        self.results = {}  # by request, as passed on
        self.max_sequences = 0
        self.staging_timeouts = []
        self.wires = []  # by which weights came
        self.deltas = []  # whether they came as differences
        self.digests = []
        self.names_received = []  # of tensors, by update
        self.commits_in_flight = []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def submit(self, request, on_tokens=None):
        self.requests.append(request)
        if len(self.requests) == self._dies_at_request:
            raise RunError("the engine died")
        future, seen = self._engine.submit(request, on_tokens), Future()
        self.max_sequences = max(self.max_sequences, self._engine.num_sequences())
        future.add_done_callback(lambda done: self._pass_on(request, done, seen))
        return seen

    def _pass_on(self, request, done, seen):
        if done.exception() is not None:
            seen.set_exception(done.exception())
        elif request.token_ids in self._fails:
            seen.set_result(GenerationResult(request_id=request.request_id, error="refused"))
        else:
            if len(self.commits_in_flight) > self._scales_after_commit:
                for completion in done.result().completions:
                    completion.logprobs[:] *= self._logprob_scale
                    completion.logprobs[:] += np.resize(self._logprob_error, len(completion.logprobs))
            self.results[request.request_id] = done.result()
            seen.set_result(done.result())

    def stage_weights(self, manifest, rendezvous, *, timeout_s):
        self.staging_timeouts.append(timeout_s)
        self.wires.append(rendezvous.backend)
        self.deltas.append(rendezvous.sends_deltas)
        self.names_received.append({entry.name for entry in manifest.entries})
        digests = self._engine.stage_weights(manifest, rendezvous, timeout_s=timeout_s)
        self.digests += digests
        self._identities = tuple(weights_identity(manifest.base, digest) for digest in digests)
        return digests

    def commit_weights(self, policy_version, *, in_flight, timeout_s):
        self.commits_in_flight.append(in_flight)
        if self._forgets_to_commit and len(self.commits_in_flight) > 1:
            return self._identities  # as if it had not
        return self._engine.commit_weights(policy_version, in_flight=in_flight, timeout_s=timeout_s)


class InlineReward:
    """A reward function, or one for each task, behind the interface of the reward workers."""

    def __init__(self, score):
        self._score = score

    def submit(self, responses, problem):
        future, score = Future(), self._score[problem.task] if isinstance(self._score, dict) else self._score
        future.set_result([score(response, problem.ground_truth) for response in responses])
        return future

    def close(self):
        pass
