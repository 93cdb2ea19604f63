"""Test reading of a worker's lines, however they are split in transit."""

import asyncio

import pytest

from coati_rl.types import Score
from rewards.workers.worker import Worker, WorkerLostError

LINE = b'{"reward": 1.0, "answer_correct": true, "format_valid": true, "verdict": "ok"}\n'
SCORE = Score(reward=1.0, answer_correct=True, format_valid=True, verdict="ok")


def heard(*pieces: bytes, num_scores: int, has_ended: bool = True) -> list[Score]:
    """The scores in what has arrived of a worker."""
    worker = Worker(0, lambda: None)
    for piece in pieces:
        worker.data_received(piece)
    if has_ended:
        worker.connection_lost(None)
    return asyncio.run(worker.scores(num_scores, 5.0))


def test_scores_are_taken_whole_also_those_before_the_end() -> None:
    assert heard(LINE[:10], LINE[10:] + LINE + LINE[:5], num_scores=2) == [SCORE, SCORE]


@pytest.mark.parametrize("rest", [b"", LINE[:-1]])
def test_an_end_before_the_last_score_loses_the_worker(rest: bytes) -> None:
    with pytest.raises(WorkerLostError, match="it has ended"):
        heard(LINE + rest, num_scores=2)


@pytest.mark.parametrize("line", [b"\n", b"[]\n", b"hello\n", b'{"reward": 1.0}\n', b'{"ready": 7}\n'])
def test_what_is_no_score_loses_the_worker(line: bytes) -> None:
    with pytest.raises(WorkerLostError, match="an invalid score"):
        heard(LINE + line, num_scores=2, has_ended=False)
