"""Test migrations from each version of the checkpoint format to the next, and refusals."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

from coati_rl.checkpoint.directory import load_state, read_state, write_manifest, write_state
from coati_rl.checkpoint.format import FORMAT_VERSION, MIGRATIONS, migrate_rollouts, migrate_state
from coati_rl.checkpoint.position import Position, data_state, read_data_state
from coati_rl.checkpoint.untrained_rollouts import UntrainedRollouts
from coati_rl.errors import ConfigError
from coati_rl.reading.draw_order import DrawOrder
from coati_rl.types import Prompt

POSITION = {
    "step": 3,
    "num_drawn": 8,
    "waiting": ["train-1.0"],
    "last_evaluated": -1,
    "groups_filtered": 0,
    "samples_failed": 0,
    "time_s": 1.5,
}
DRAW_ORDER = {"seed": 0, "num_prompts": 12, "fingerprint": "abc"}
TO_2 = MIGRATIONS[0]


def test_the_first_state_gets_an_empty_list_of_kept_rollouts_and_no_digest_of_ground_truths():
    state = {"step": 3, "rng_state": "AA==", "data": {"position": POSITION, "draw_order": DRAW_ORDER}}
    position, order = read_data_state(TO_2.state(state)["data"])
    assert position == Position(step=3, num_drawn=8, waiting=("train-1.0",), time_s=1.5)
    assert order == DrawOrder(**DRAW_ORDER, ground_truths="")
    assert TO_2.state(state)["rng_state"] == "AA=="
    assert state["data"]["draw_order"] == DRAW_ORDER, "a migration changes nothing in place"


def test_what_the_first_state_says_of_both_stays():
    position, order = {**POSITION, "kept": ["train-4.0"]}, {**DRAW_ORDER, "ground_truths": "def"}
    state = {"data": {"position": position, "draw_order": order}}
    assert TO_2.state(state) == state


def test_a_response_of_the_first_rollouts_becomes_a_trajectory_of_one_turn_after_the_prompt():
    score = {"reward": 1.0, "answer_correct": True, "format_valid": True, "verdict": "ok"}
    responses = [
        {"num_tokens": 3, "finish_reason": "stop", "text": "abc", "score": score},
        {"num_tokens": 0, "finish_reason": "abort", "text": "", "score": {**score, "reward": 0.0}},
        {"num_tokens": 2, "finish_reason": "length", "text": "de", "score": score},
    ]
    groups = [
        {"uid": "p0", "producer_id": 1, "temperature": 0.7, "responses": responses[:2]},
        {"uid": "p1", "producer_id": 0, "temperature": 1.0, "responses": responses[2:]},
    ]
    description = {"lease_syncs": [-1], "samples_failed": 2, "sync_index_of": [[4, -1]], "groups": groups}
    arrays = {
        "token_ids": np.array([10, 11, 12, 13, 14], dtype=np.int32),
        "logprobs": np.array([-1, -2, -3, -4, -5], dtype=np.float32),
        "policy_versions": np.array([4, 4, 5, 5, 5], dtype=np.int32),
    }
    buffer = io.BytesIO()
    np.savez(buffer, description=np.frombuffer(json.dumps(description).encode(), dtype=np.uint8), **arrays)
    kept = UntrainedRollouts.from_bytes(
        buffer.getvalue(), lambda uid: Prompt(uid=uid, token_ids=(1, 2, 3), ground_truth="4")
    )
    (finished,), (dropped,) = kept.finished, kept.dropped
    assert (kept.samples_failed, kept.sync_index_of, finished.sync_index) == (2, {4: -1}, -1)
    first, empty = finished.group.trajectories
    assert (first.token_ids.tolist(), first.loss_mask.tolist()) == ([1, 2, 3, 10, 11, 12], [False] * 3 + [True] * 3)
    assert (first.logprobs.tolist(), first.policy_versions.tolist()) == ([-1.0, -2.0, -3.0], [4, 4, 5])
    assert first.temperature.tolist() == [np.float32(0.7)] * 3
    assert (first.text, first.finish_reason, first.prefix.num_tokens) == ("abc", "stop", 3)
    assert (empty.episode, empty.num_loss_tokens, empty.finish_reason) == (1, 0, "abort")
    assert [each.reward for each in finished.group.scores] == [1.0, 0.0]
    assert (dropped.trajectories[0].token_ids.tolist(), dropped.temperature) == ([1, 2, 3, 13, 14], 1.0)
    assert (dropped.policy_versions.tolist(), dropped.oldest_version) == ([5, 5], 5)
    assert (finished.group.producer_id, dropped.prompt.uid) == (1, "p1")


def test_what_is_written_today_is_of_the_newest_version_and_read_as_it_is(tmp_path):
    state = {"step": 3, "data": data_state(Position(step=3), DrawOrder(**DRAW_ORDER, ground_truths="def"))}
    write_state(tmp_path, state)
    assert json.loads((tmp_path / "state.json").read_text()) == {"format_version": FORMAT_VERSION, **state}
    assert load_state(tmp_path) == state
    with np.load(io.BytesIO(UntrainedRollouts().to_bytes())) as archive:
        assert json.loads(archive["description"].tobytes())["format_version"] == FORMAT_VERSION


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 0, "2", None])
def test_a_version_that_is_not_known_is_refused_in_one_message(tmp_path, version):
    (tmp_path / "state.json").write_text(json.dumps({"format_version": version, "step": 3}))
    write_manifest(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_state(tmp_path)
    assert str(caught.value) == (
        f"--checkpoint-path {tmp_path}: its format has version {version!r}, and this version of the project reads 1 to "
        f"{FORMAT_VERSION}: use the version that wrote it or a later one, or start from its weights alone with --model"
    )
    with pytest.raises(ValueError, match=f"its format has version {version!r}"):
        migrate_rollouts({"description": {"format_version": version}})


def test_every_version_before_the_newest_has_a_checkpoint_to_be_resumed_by_a_test():
    data = Path(__file__).parents[2] / "data"
    assert sorted(path.name for path in data.glob("checkpoint_v*")) == [
        f"checkpoint_v{version}" for version in range(1, FORMAT_VERSION)
    ]


def test_a_state_without_data_stays_without():
    assert migrate_state({"step": 3}) == {"step": 3}
