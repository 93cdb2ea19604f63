"""Score the responses to a prompt with a reward model that is served over HTTP.

The protocol is that of OpenRLHF's --remote_rm_url, so that its `serve_rm` and compatible servers can be used. Request:
POST {"query": [prompt + response], "prompts": [prompt], "labels": [ground truth]}, one of each per response. Reply:
{"rewards": [number]}, and optionally {"scores": [number]}, where a response is correct from 1 on. Without scores it is
correct if its reward is at least `correct_from`.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from coati_rl.http_call import HttpCallError, call, check_url, new_client, run
from coati_rl.reward_url import filled_in, without_secrets
from coati_rl.text import shorten
from coati_rl.types import Problem, Score
from rewards.reward import bounded, invalid_score

_CORRECT_FROM = 1.0  # score from which a response counts as correct; also the default for rewards


class HttpReward:
    """Implement `Reward` with a reward model; all responses are sent in one request.

    Args:
        url: full address of the POST request; it may name environment variables as ${NAME}.
        secrets: the values of those variables.
        timeout_s: time limit of one `score`, retries included, in seconds; it must be below the time limit of the
            scoring process, which would otherwise be killed before it reports the cause.
        correct_from: reward that makes a response correct if the model gives no scores.
    Raises: ConfigError for an invalid URL.
    """

    is_batch = True

    def __init__(
        self,
        url: str,
        *,
        secrets: Mapping[str, str] | None = None,
        timeout_s: float = 50.0,
        correct_from: float = _CORRECT_FROM,
    ) -> None:
        self._correct_from = correct_from
        self._secrets = secrets or {}
        self._url = check_url(filled_in(url, self._secrets), flag="--reward-type", allows_query=True)
        self._name = urlsplit(url).netloc.rpartition("@")[2]  # without a password, for messages
        self._timeout_s = timeout_s

    def score(self, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
        """See `Reward.score`. Without a reply in time all scores are invalid; an invalid number only its response's."""
        queries = [problem.prompt + response for response in responses]
        if not any(queries):  # nothing to score, for example in a health probe: do not call the model
            return iter([invalid_score("neither a prompt nor a response")] * len(queries))
        body = {
            "query": queries,
            "prompts": [problem.prompt] * len(queries),
            "labels": [problem.ground_truth] * len(queries),
        }
        try:
            reply = run(self._post(json.dumps(body).encode()))
            return iter(_scores(reply, len(queries), self._correct_from))
        except (HttpCallError, ValueError, OverflowError) as error:
            reason = without_secrets(str(error), self._url, self._secrets)
            return iter([invalid_score(f"the reward model {self._name}: {reason}")] * len(queries))

    async def _post(self, body: bytes) -> bytes:
        deadline = monotonic() + self._timeout_s
        headers = {"Content-Type": "application/json"}
        async with new_client() as client:
            return await call(client, "POST", self._url, deadline=deadline, body=body, headers=headers)


def _scores(reply: bytes, num_responses: int, correct_from: float) -> list[Score]:
    """Convert a reply to scores. Raises: ValueError, of one line, if it does not hold one number per response."""
    try:
        fields = json.loads(reply)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the reply is not JSON: {shorten(reply.decode(errors='replace'))}") from error
    rewards = _numbers(fields, "rewards", num_responses)
    scores, least = rewards, correct_from
    if isinstance(fields, dict) and fields.get("scores") is not None:
        scores, least = _numbers(fields, "scores", num_responses), _CORRECT_FROM
    return [_score(reward, score, least) for reward, score in zip(rewards, scores, strict=True)]


def _numbers(fields: Any, key: str, num_responses: int) -> list[Any]:
    values = fields.get(key) if isinstance(fields, dict) else None
    if not isinstance(values, list) or len(values) != num_responses:
        raise ValueError(f'the reply has no "{key}" of {num_responses} numbers: {shorten(fields)}')
    return values


def _score(reward: Any, score: Any, correct_from: float) -> Score:
    for value in (reward, score):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            return invalid_score(f"the reward model returned {shorten(value)} instead of a finite number")
    is_correct = score >= correct_from
    found = Score(
        reward=float(reward),
        answer_correct=is_correct,
        format_valid=True,
        verdict="ok" if is_correct else "wrong",
        detail=f"the reward model: {reward:g}",
        filter_score=None if score == reward else float(score),
    )
    return bounded(found)
