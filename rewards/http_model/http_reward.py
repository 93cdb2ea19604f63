"""Ask a served reward model over HTTP for a number for each response to a prompt.

The protocol is that of OpenRLHF's --remote_rm_url, so that its `serve_rm` and servers written for it fit. POST to the
URL: {"query": [prompt + response], "prompts": [prompt], "labels": [ground truth]}, one of each per response. Answer:
{"rewards": [number]}, and if the model likes {"scores": [number]}, on a scale where 1 is right.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from coati_rl.reward_url import filled_in, without_secrets
from coati_rl.text import shorten
from coati_rl.types import Problem, Score
from rewards.http_model.http_call import CallError, call, check_url, new_client, run
from rewards.reward import bounded, invalid_score

_RIGHT = 1.0  # the score from which a response counts as right


class HttpReward:
    """Asks a reward model; all responses in one request.

    Args:
        url: the address that takes the POST, path included; it may name environment variables, as ${NAME}.
        secrets: the values of those variables.
        timeout_s: for one `score`, retries included; keep it below the time limit of the process that scores, which
            would be killed without a reason.
    Raises: ConfigError for a URL that is none.
    """

    is_batch = True

    def __init__(self, url: str, *, secrets: Mapping[str, str] | None = None, timeout_s: float = 50.0) -> None:
        self._secrets = secrets or {}
        self._url = check_url(filled_in(url, self._secrets), flag="--reward-type", allows_query=True)
        self._name = urlsplit(url).netloc.rpartition("@")[2]  # without a password, for messages
        self._timeout_s = timeout_s

    def score(self, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
        """As `Reward.score`. Without an answer in time all are invalid, and a number that is none its response."""
        queries = [problem.prompt + response for response in responses]
        if not any(queries):  # nothing to judge: so a process that warms up does not need the model
            return iter([invalid_score("neither a prompt nor a response")] * len(queries))
        body = {
            "query": queries,
            "prompts": [problem.prompt] * len(queries),
            "labels": [problem.ground_truth] * len(queries),
        }
        try:
            reply = run(self._post(json.dumps(body).encode()))
            return iter(_scores(reply, len(queries)))
        except (CallError, ValueError, OverflowError) as error:
            reason = without_secrets(str(error), self._url, self._secrets)
            return iter([invalid_score(f"the reward model {self._name}: {reason}")] * len(queries))

    async def _post(self, body: bytes) -> bytes:
        deadline = monotonic() + self._timeout_s
        headers = {"Content-Type": "application/json"}
        async with new_client() as client:
            return await call(client, "POST", self._url, deadline=deadline, body=body, headers=headers)


def _scores(reply: bytes, num_responses: int) -> list[Score]:
    """Raises: ValueError, of one line, when the reply does not hold one number per response."""
    try:
        fields = json.loads(reply)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the reply is not JSON: {shorten(reply.decode(errors='replace'))}") from error
    rewards = _numbers(fields, "rewards", num_responses)
    scores = rewards
    if isinstance(fields, dict) and fields.get("scores") is not None:
        scores = _numbers(fields, "scores", num_responses)
    return [_score(reward, score) for reward, score in zip(rewards, scores, strict=True)]


def _numbers(fields: Any, key: str, num_responses: int) -> list[Any]:
    values = fields.get(key) if isinstance(fields, dict) else None
    if not isinstance(values, list) or len(values) != num_responses:
        raise ValueError(f'the reply has no "{key}" of {num_responses} numbers: {shorten(fields)}')
    return values


def _score(reward: Any, score: Any) -> Score:
    for value in (reward, score):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            return invalid_score(f"the reward model answered {shorten(value)} where a finite number belongs")
    is_correct = score >= _RIGHT
    found = Score(
        reward=float(reward),
        answer_correct=is_correct,
        format_valid=True,
        verdict="ok" if is_correct else "wrong",
        detail=f"the reward model: {reward:g}",
        filter_score=None if score == reward else float(score),
    )
    return bounded(found)
