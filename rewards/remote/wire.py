"""Convert scores to JSON and back, for client, service and each line of `score`.

POST /score carries a `ScoreRequest`; its answer is a `ScoreReply`, one score per response, in order. All that arrives
is validated: a request holds nothing unknown; a reply may (the service may be newer), but no score that is not one.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, FiniteFloat, ValidationError

from coati_rl.text import shorten
from coati_rl.types import Problem, Score, Verdict
from rewards.reward import invalid_score

TOKEN_VARIABLE = "COATI_REWARD_TOKEN"  # the environment variable with the secret that client and service share
MIN_TOKEN_LENGTH = 12  # characters; a shorter one can be tried out


class ProblemRecord(BaseModel):
    """A `coati_rl.types.Problem`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ground_truth: str
    uid: str = ""
    messages: Annotated[list[dict[str, Any]], FailFast()] = []  # FailFast: a million bad items are one complaint
    prompt: str = ""

    def to_problem(self) -> Problem:
        """The same, as scorers know it."""
        return Problem(ground_truth=self.ground_truth, uid=self.uid, messages=tuple(self.messages), prompt=self.prompt)


class ScoreRequest(BaseModel):
    """The responses to one problem."""

    model_config = ConfigDict(extra="forbid", strict=True)

    responses: Annotated[list[str], FailFast()]
    problem: ProblemRecord
    reward_type: str | None = None  # what the client expects to be scored with; None: whatever the service has


class ScoreRecord(BaseModel):
    """A `coati_rl.types.Score`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    reward: FiniteFloat
    answer_correct: bool
    format_valid: bool
    verdict: Verdict
    detail: str = ""
    breakdown: dict[str, FiniteFloat] = {}
    filter_score: FiniteFloat | None = None


class ScoreReply(BaseModel):
    """The scores of the responses of a request."""

    model_config = ConfigDict(extra="ignore", strict=True)

    scores: Annotated[list[ScoreRecord], FailFast()]


class HealthReply(BaseModel):
    """Describe what GET /health says."""

    model_config = ConfigDict(extra="ignore", strict=True)

    status: str  # "ok", or "broken" with an `error`
    reward_type: str
    version: str  # of this project
    num_workers: int  # scoring processes
    queued: int  # responses that were accepted and are not scored yet
    error: str = ""


def is_token(text: str) -> bool:
    """True for what can be a secret in an HTTP header: visible ASCII, at least one character."""
    return bool(text) and all("!" <= character <= "~" for character in text)


def request_body(responses: Sequence[str], problem: Problem, reward_type: str | None) -> bytes:
    """The body of POST /score."""
    return json.dumps({"responses": list(responses), "problem": asdict(problem), "reward_type": reward_type}).encode()


def reply_body(scores: Sequence[Score]) -> bytes:
    """The body of the answer to POST /score."""
    return json.dumps({"scores": [score_fields(score) for score in scores]}, allow_nan=False).encode()


def parse_reply(body: bytes, num_responses: int) -> list[Score]:
    """The scores in an answer to POST /score.

    Raises: ValueError, of one line, when that is not `num_responses` valid scores.
    """
    try:
        records = ScoreReply.model_validate_json(body).scores
    except ValidationError as error:
        raise ValueError(f"the reply is no list of scores: {complaints(error)}") from error
    if len(records) != num_responses:
        raise ValueError(f"the reply holds {len(records)} scores for {num_responses} responses")
    return [Score(**record.model_dump()) for record in records]


def score_fields(score: Score) -> dict[str, Any]:
    """A score as a JSON object; a breakdown and a filter score are in it only if there is one.

    JSON has no NaN and no infinity: a score that holds one is invalid.
    """
    fields = asdict(score)
    try:
        ScoreRecord.model_validate(fields)
    except ValidationError as error:
        fields = asdict(invalid_score(f"the reward returned no valid score: {complaints(error)}"))
    return {key: value for key, value in fields.items() if value is not None and value != {}}


def complaints(error: ValidationError) -> str:
    """List what pydantic found, on one line: field and fault of at most three."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    texts = [f"{'.'.join(str(part) for part in item['loc']) or 'body'}: {shorten(item['msg'])}" for item in found[:3]]
    return "; ".join(texts) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
