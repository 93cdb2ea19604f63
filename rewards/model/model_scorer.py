"""Score groups by a reward model: convert problems to conversations, and judgements to scores."""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from coati_rl.text import shorten
from coati_rl.types import Problem, Score
from rewards.model.judgement import JudgedConversation, Judgement, ModelClient
from rewards.model.request_batcher import LocalModel
from rewards.reward import bounded, invalid_score

if TYPE_CHECKING:
    from rewards.model.reward_model import RewardModel


class ModelScorer:
    """Implement `GroupScorer` with the client of a reward model.

    Args:
        client: of the model; closed with the scorer.
        correct_from: reward from which a response counts as correct.
    """

    def __init__(self, client: ModelClient, *, correct_from: float = 1.0) -> None:
        self._client = client
        self._correct_from = correct_from

    def submit(self, responses: Sequence[str], problem: Problem) -> "Future[list[Score]]":
        """See `GroupScorer.submit`. A response that the model gives no number for is invalid."""
        scores: Future[list[Score]] = Future()
        scores.set_running_or_notify_cancel()
        if not problem.messages and not problem.prompt:  # a health probe, or a line to score without its question
            scores.set_result(
                [invalid_score("the reward model: there are neither messages nor a prompt")] * len(responses)
            )
            return scores
        judged = self._client.submit(
            [
                JudgedConversation(messages=problem.messages, response=response, prompt=problem.prompt)
                for response in responses
            ]
        )
        judged.add_done_callback(partial(_settle, scores, len(responses), self._correct_from))
        return scores

    def close(self) -> None:
        self._client.close()


def open_local_model(directory: Path) -> LocalModel:
    """Return a client that loads the model in this process with its first request: bf16 on a GPU, else fp32."""
    return LocalModel(partial(_load, directory))


def _load(directory: Path) -> "RewardModel":
    import torch

    from rewards.model.reward_model import RewardModel

    on_gpu = torch.cuda.is_available()
    return RewardModel(directory, device="cuda" if on_gpu else "cpu", dtype=torch.bfloat16 if on_gpu else torch.float32)


def _settle(
    scores: "Future[list[Score]]", num_responses: int, correct_from: float, judged: "Future[list[Judgement]]"
) -> None:
    error = judged.exception()
    if error is not None:
        scores.set_result([invalid_score(f"the reward model: {shorten(error, 200)}")] * num_responses)
        return
    scores.set_result([_score(judgement, correct_from) for judgement in judged.result()])


def _score(judgement: Judgement, correct_from: float) -> Score:
    if judgement.problem or not math.isfinite(judgement.reward):
        return invalid_score(f"the reward model: {judgement.problem or judgement.reward}")
    is_correct = judgement.reward >= correct_from
    return bounded(
        Score(
            reward=judgement.reward,
            answer_correct=is_correct,
            format_valid=True,
            verdict="ok" if is_correct else "wrong",
            detail=f"the reward model: {judgement.reward:g}",
        )
    )
