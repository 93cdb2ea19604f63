"""Test rollouts as JSONL, trained or not."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from coati_rl.errors import RunError
from coati_rl.observability.rollouts import RolloutRecorder
from coati_rl.types import Baseline, Completion, Prompt, RolloutGroup, Score
from producer.environments.single_turn import single_turns
from tests.unit.batching.trajectories import FORKED

PROMPT = Prompt(uid="train-3.0", token_ids=(1,), ground_truth="4", text="2+2?")


@pytest.fixture
def completion():
    return Completion(
        token_ids=np.array([5, 6], dtype=np.int32),
        logprobs=np.zeros(2, dtype=np.float32),
        policy_versions=np.array([2, 4], dtype=np.int32),
        finish_reason="stop",
        text="½ — \\boxed{4}\n",
    )


@pytest.fixture
def group(completion):
    empty = Completion(
        token_ids=np.array([], dtype=np.int32),
        logprobs=np.array([], dtype=np.float32),
        policy_versions=np.array([], dtype=np.int32),
        finish_reason="abort",
        text="",
    )
    return RolloutGroup(
        lease_id=0,
        producer_id=1,
        prompt=PROMPT,
        temperature=0.7,
        trajectories=single_turns(PROMPT, [completion, empty], temperature=0.7),
        scores=(
            Score(reward=1.0, answer_correct=True, format_valid=True, verdict="ok"),
            Score(reward=math.nan, answer_correct=False, format_valid=False, verdict="invalid", detail="timed out"),
        ),
    )


FIRST_ONLY = {("train-3.0", 0): -0.25}


def test_half_of_a_surrogate_pair_is_written_as_its_escape(tmp_path, group):
    """An environment's detail may have one: it must not end the run."""
    scores = (group.scores[0], replace(group.scores[1], detail="half \ud83d of it"))
    RolloutRecorder(tmp_path, "text").write(1, [replace(group, scores=scores)], advantages=FIRST_ONLY)
    (path,) = tmp_path.iterdir()
    assert "half \\ud83d of it" in path.read_text(encoding="utf-8")
    assert lines_of(path)[1]["detail"] == "half \ud83d of it"


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_every_sample_is_a_line_with_what_a_person_asks_for(tmp_path, group):
    RolloutRecorder(tmp_path / "rollouts", "text").write(7, [group], advantages=FIRST_ONLY)
    first, second = lines_of(tmp_path / "rollouts/steps-000001-000100.jsonl")
    assert first == {
        "step": 7,
        "uid": "train-3.0",
        "sample": 0,
        "episode": 0,
        "producer": 1,
        "prompt": "2+2?",
        "gt_answer": "4",
        "response": "½ — \\boxed{4}\n",
        "num_tokens": 2,
        "finish_reason": "stop",
        "temperature": 0.7,
        "policy_versions": [2, 4],
        "reward": 1.0,
        "answer_correct": True,
        "format_valid": True,
        "verdict": "ok",
        "detail": "",
        "is_trained": True,
        "advantage": -0.25,
    }
    assert (second["sample"], second["policy_versions"], second["verdict"]) == (1, [], "invalid")
    assert (second["is_trained"], second["advantage"]) == (False, None)
    assert second["reward"] is None, "a reward without meaning may be no number, which JSON cannot say"


def test_the_reward_of_a_greedy_answer_is_in_the_lines_of_its_samples(tmp_path, group):
    RolloutRecorder(tmp_path, "text").write(1, [group], advantages={})
    for number, verdict in enumerate(("wrong", "invalid"), 2):
        greedy = Score(reward=0.25, answer_correct=False, format_valid=True, verdict=verdict)
        compared = replace(group, baseline=Baseline(score=greedy, num_tokens=9))
        RolloutRecorder(tmp_path, "text").write(number, [compared], advantages={})
    plain, scored, lost = (lines_of(tmp_path / "steps-000001-000100.jsonl")[start : start + 2] for start in (0, 2, 4))
    assert not any("baseline_reward" in line for line in plain)
    assert [line["baseline_reward"] for line in (*scored, *lost)] == [0.25, 0.25, None, None]


def test_each_trajectory_of_an_episode_has_its_whole_conversation(tmp_path, forked_group):
    said = [[{"role": "user", "content": "Q"}, {"role": "assistant", "content": answer}] for answer in ("one", "two")]
    records = {"ended": "done", "conversations": said}, {"ended": "turns", "conversations": ["Once upon a time"]}
    group = replace(forked_group(), records=records)
    assert [each.episode for each in group.trajectories] == [0, 0, 1]
    RolloutRecorder(tmp_path, "text").write(1, [group], advantages={})
    lines = lines_of(tmp_path / "steps-000001-000100.jsonl")
    assert [(line.get("messages"), line.get("text")) for line in lines] == [
        (said[0], None),
        (said[1], None),
        (None, "Once upon a time"),
    ]
    assert [line.get("environment") for line in lines] == [None, {"ended": "done"}, {"ended": "turns"}]


def test_records_from_before_conversations_were_kept_have_none(tmp_path, forked_group):
    group = replace(forked_group(), records=({"ended": "done", "conversations": []}, {"ended": "done"}))
    RolloutRecorder(tmp_path, "text").write(1, [group], advantages={})
    assert not any({"messages", "text"} & line.keys() for line in lines_of(tmp_path / "steps-000001-000100.jsonl"))


def test_a_full_disk_is_told_with_path_and_remedy(tmp_path, group):
    path = tmp_path / "steps-000001-000100.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(RunError, match=f"{path} cannot be written: No space left on device; free space there"):
        RolloutRecorder(tmp_path).write(7, [group], advantages=FIRST_ONLY)


def test_full_lines_hold_tokens_with_their_log_probabilities_and_versions(tmp_path, group):
    RolloutRecorder(tmp_path).write(7, [group], advantages=FIRST_ONLY)
    first, second = lines_of(tmp_path / "steps-000001-000100.jsonl")
    keys = ("prompt_token_ids", "token_ids", "token_versions", "turns", "rollout_logprobs")
    assert [first[key] for key in keys] == [[1], [5, 6], [[2, 1], [4, 1]], [[0, 2, "stop"]], [0.0, 0.0]]
    assert [second[key] for key in keys] == [[1], [], [], [[0, 0, "abort"]], []]
    RolloutRecorder(tmp_path / "text", "text").write(7, [group], advantages=FIRST_ONLY)
    texts = lines_of(tmp_path / "text" / "steps-000001-000100.jsonl")
    assert [{**line, **dict.fromkeys(keys)} for line in texts] == [
        {**first, **dict.fromkeys(keys)},
        {**second, **dict.fromkeys(keys)},
    ]


def test_tokens_are_read_back_as_they_were(tmp_path, group, completion):
    logprobs = -(np.random.default_rng(0).exponential(1.0, size=1000).astype(np.float32) ** 3)
    completion = replace(
        completion,
        token_ids=np.arange(1000, dtype=np.int32) * 151,
        logprobs=logprobs,
        policy_versions=np.repeat(np.array([3, 5, 4], dtype=np.int32), [1, 990, 9]),
    )
    group = replace(group, trajectories=single_turns(PROMPT, [completion], temperature=0.7), scores=group.scores[:1])
    RolloutRecorder(tmp_path).write(1, [group], advantages={})
    (line,) = lines_of(tmp_path / "steps-000001-000100.jsonl")
    assert line["token_ids"] == completion.token_ids.tolist()
    assert line["token_versions"] == [[3, 1], [5, 990], [4, 9]]
    assert (np.array(line["rollout_logprobs"], dtype=np.float32) == logprobs).all()


def test_turns_contexts_between_them_and_forks_are_read_back(tmp_path, group):
    prompt = replace(PROMPT, token_ids=(1, 2, 3))
    RolloutRecorder(tmp_path).write(1, [replace(group, prompt=prompt, trajectories=FORKED)], advantages={})
    first, fork, other = lines_of(tmp_path / "steps-000001-000100.jsonl")
    assert [(line["sample"], line["episode"], line["num_tokens"]) for line in (first, fork, other)] == [
        (0, 0, 5),
        (1, 0, 1),
        (2, 1, 2),
    ]
    assert (first["prompt_token_ids"], first["token_ids"]) == ([1, 2, 3], [10, 11, 20, 21, 12, 13, 14])
    assert first["turns"] == [[0, 2, "stop"], [4, 7, "stop"]]
    assert first["loss_mask"] == [[True, 2], [False, 2], [True, 3]]
    assert first["token_versions"] == [[7, 2], [-1, 2], [7, 3]]
    assert first["rollout_logprobs"] == [-3 / 8, -4 / 8, 0.0, 0.0, -7 / 8, -1.0, -9 / 8]
    assert first["token_rewards"] == [[1, "tool", 0.5]]
    assert (fork["parent_sample"], fork["num_shared_tokens"]) == (0, 5)
    assert (fork["prompt_token_ids"], fork["token_ids"]) == ([1, 2, 3, 10, 11, 22], [15])
    assert {"loss_mask", "parent_sample", "token_rewards", "token_temperatures"}.isdisjoint(other)


def test_turns_of_different_temperatures_say_so(tmp_path, group):
    first, *others = FORKED
    changed = replace(first, temperature=np.array([0.5, 0.5, 1, 1, 1], dtype=np.float32))
    prompt = replace(PROMPT, token_ids=(1, 2, 3))
    mixed = replace(group, prompt=prompt, trajectories=(changed, *others))
    RolloutRecorder(tmp_path).write(1, [mixed], advantages={})
    assert lines_of(tmp_path / "steps-000001-000100.jsonl")[0]["token_temperatures"] == [[0.5, 2], [1.0, 3]]


def test_a_log_probability_that_is_no_number_is_null(tmp_path, group, completion):
    completion = replace(completion, logprobs=np.array([-np.inf, -0.5], dtype=np.float32))
    group = replace(group, trajectories=single_turns(PROMPT, [completion], temperature=0.7), scores=group.scores[:1])
    RolloutRecorder(tmp_path).write(1, [group], advantages={})
    assert lines_of(tmp_path / "steps-000001-000100.jsonl")[0]["rollout_logprobs"] == [None, -0.5]


@pytest.mark.parametrize(
    ("step", "name"), [(1, "steps-000001-000100"), (100, "steps-000001-000100"), (101, "steps-000101-000200")]
)
def test_a_file_holds_a_hundred_steps(tmp_path, group, step, name):
    RolloutRecorder(tmp_path).write(step, [group], advantages=FIRST_ONLY)
    assert [path.stem for path in tmp_path.iterdir()] == [name]


def test_a_later_step_is_appended(tmp_path, group):
    recorder = RolloutRecorder(tmp_path)
    recorder.write(1, [group], advantages=FIRST_ONLY)
    recorder.write(2, [group, group], advantages=FIRST_ONLY)
    assert [line["step"] for line in lines_of(tmp_path / "steps-000001-000100.jsonl")] == [1, 1, 2, 2, 2, 2]


def test_a_reward_of_several_parts_is_written_with_them(tmp_path, group):
    scores = [replace(score, breakdown={"boxed": 1.0, "mine.score": math.inf}) for score in group.scores]
    RolloutRecorder(tmp_path).write(1, [replace(group, scores=tuple(scores))], advantages=FIRST_ONLY)
    lines = lines_of(tmp_path / "steps-000001-000100.jsonl")
    assert [line["breakdown"] for line in lines] == [{"boxed": 1.0, "mine.score": None}] * 2


def test_megabytes_of_tests_are_not_written_with_each_sample(tmp_path, group):
    long = replace(group, prompt=replace(group.prompt, ground_truth="x" * 5000))
    RolloutRecorder(tmp_path).write(1, [long], advantages=FIRST_ONLY)
    assert lines_of(tmp_path / "steps-000001-000100.jsonl")[0]["gt_answer"] == "x" * 2000 + "..."
