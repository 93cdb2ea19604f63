"""Convert scores to JSON and back, for client, service and each line of `score`.

The body of POST /score is a `ScoreRequest`; the reply is a `ScoreReply`, one score per response, in order. Both are
validated: unknown fields are refused in a request and ignored in a reply, since the service may be newer.
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
MIN_TOKEN_LENGTH = 12  # characters; a shorter one could be guessed


class ProblemRecord(BaseModel):
    """Represent a `coati_rl.types.Problem` in JSON."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ground_truth: str
    uid: str = ""
    messages: Annotated[list[dict[str, Any]], FailFast()] = []  # FailFast: report only the first of many invalid items
    prompt: str = ""
    columns: dict[str, Any] = {}

    def to_problem(self) -> Problem:
        """Return the problem in the type that scorers take."""
        return Problem(
            ground_truth=self.ground_truth,
            uid=self.uid,
            messages=tuple(self.messages),
            prompt=self.prompt,
            columns=self.columns,
        )


class ScoreRequest(BaseModel):
    """Represent the responses to one problem."""

    model_config = ConfigDict(extra="forbid", strict=True)

    responses: Annotated[list[str], FailFast()]
    problem: ProblemRecord
    reward_type: str | None = None  # reward type that the client expects; None: the service's


class ScoreRecord(BaseModel):
    """Represent a `coati_rl.types.Score` in JSON."""

    model_config = ConfigDict(extra="ignore", strict=True)

    reward: FiniteFloat
    answer_correct: bool
    format_valid: bool
    verdict: Verdict
    detail: str = ""
    breakdown: dict[str, FiniteFloat] = {}
    filter_score: FiniteFloat | None = None


class ScoreReply(BaseModel):
    """Represent the scores of a request's responses."""

    model_config = ConfigDict(extra="ignore", strict=True)

    scores: Annotated[list[ScoreRecord], FailFast()]


class HealthReply(BaseModel):
    """Represent the reply of GET /health."""

    model_config = ConfigDict(extra="ignore", strict=True)

    status: str  # "ok", or "broken" with an `error`
    reward_type: str
    version: str  # of this project
    num_workers: int  # scoring processes
    queued: int  # responses that were accepted and are not scored yet
    error: str = ""


def is_token(text: str) -> bool:
    """Return True if a text can be a secret in an HTTP header: visible ASCII, at least one character."""
    return bool(text) and all("!" <= character <= "~" for character in text)


def request_body(responses: Sequence[str], problem: Problem, reward_type: str | None) -> bytes:
    """Return the body of POST /score."""
    record = asdict(problem)
    del record["task"]  # a service has one reward for all tasks
    if not problem.columns:
        del record["columns"]  # an earlier service does not know them
    return json.dumps({"responses": list(responses), "problem": record, "reward_type": reward_type}).encode()


def reply_body(scores: Sequence[Score]) -> bytes:
    """Return the body of the reply to POST /score."""
    return json.dumps({"scores": [score_fields(score) for score in scores]}, allow_nan=False).encode()


def parse_reply(body: bytes, num_responses: int) -> list[Score]:
    """Read the scores of a reply to POST /score.

    Raises: ValueError, of one line, if it does not hold `num_responses` valid scores.
    """
    try:
        records = ScoreReply.model_validate_json(body).scores
    except ValidationError as error:
        raise ValueError(f"the reply is not a list of scores: {describe_errors(error)}") from error
    if len(records) != num_responses:
        raise ValueError(f"the reply holds {len(records)} scores for {num_responses} responses")
    return [Score(**record.model_dump()) for record in records]


def score_fields(score: Score) -> dict[str, Any]:
    """Return a score as a JSON object, with a breakdown and a filter score only if there is one.

    A score that holds NaN or infinity, which JSON lacks, becomes an invalid score.
    """
    fields = asdict(score)
    try:
        ScoreRecord.model_validate(fields)
    except ValidationError as error:
        fields = asdict(invalid_score(f"the reward returned a score with invalid fields: {describe_errors(error)}"))
    return {key: value for key, value in fields.items() if value is not None and value != {}}


def describe_errors(error: ValidationError) -> str:
    """Return the first three errors that pydantic found, each with field and message, on one line."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    texts = [f"{'.'.join(str(part) for part in item['loc']) or 'body'}: {shorten(item['msg'])}" for item in found[:3]]
    return "; ".join(texts) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
