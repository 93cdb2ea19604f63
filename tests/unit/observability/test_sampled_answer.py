"""Test which answer is shown of those that a run samples."""

import json

import pytest

from coati_rl.observability.sampled_answer import AnswerReader, SampledAnswer

FILE = "steps-000001-000100.jsonl"


def rollout(step, number):
    return {
        **{"step": step, "prompt": f"{number} + 1?", "response": str(number + 1), "gt_answer": str(number + 1)},
        **{"reward": 1.0, "verdict": "ok", "token_ids": list(range(number))},
    }


@pytest.fixture
def write(tmp_path):
    """Step, number of rollouts -> append them."""

    def write(step, number=8, file=FILE):
        with (tmp_path / file).open("a") as rollouts:
            rollouts.writelines(json.dumps(rollout(step, each)) + "\n" for each in range(number))

    return write


def test_every_n_steps_one_answer_of_the_step_is_shown_and_one_of_the_first_step(tmp_path, write):
    reader, shown = AnswerReader(tmp_path, every=3), []
    for step in range(1, 8):
        write(step)
        if answer := reader.take(step):
            shown.append((step, answer.step, answer.prompt, answer.answer))
    assert [(at, step) for at, step, *_ in shown] == [(1, 1), (3, 3), (6, 6)]
    assert all(f"{int(answer) - 1} + 1?" == prompt for *_, prompt, answer in shown)


def test_a_resumed_run_shows_answers_of_its_own(tmp_path, write):
    for step in (1, 2):
        write(step)
    reader = AnswerReader(tmp_path, every=1, first_step=2)
    write(3, 1)
    assert reader.take(3).step == 3


def test_the_next_file_begins_anew(tmp_path, write):
    write(100)
    reader = AnswerReader(tmp_path, every=1, first_step=99)
    write(101, 1, "steps-000101-000200.jsonl")
    assert reader.take(101).step == 101


@pytest.mark.parametrize("text", ["", "not a line", '{"step": 1}\n', '{"step": 1, "prompt": "a'])
def test_what_cannot_be_read_is_not_shown_and_stops_nothing(tmp_path, text):
    reader = AnswerReader(tmp_path, every=1)
    (tmp_path / FILE).write_text(text)
    assert reader.take(1) is None
    assert AnswerReader(tmp_path / "none", every=1).take(1) is None
    assert AnswerReader(None, every=1).take(1) is None, "a job on a dataset"
    assert AnswerReader(tmp_path, every=None).take(1) is None


def test_a_row_of_a_table_has_texts_escaped_and_shortened():
    answer = SampledAnswer(step=1, prompt="a\x1b[2J", answer="b" * 4001, truth="", reward=None, verdict="invalid")
    assert answer.fields() == {
        **{"step": 1, "prompt": "a\\x1b[2J", "answer": "b" * 4000 + " ... 1 more characters", "ground truth": ""},
        **{"reward": None, "verdict": "invalid"},
    }
    assert answer.title == "answer of step 1: not scored, invalid"
