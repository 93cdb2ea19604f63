"""Test which rollouts of a step are shown, what is shown of them, and that it stays small and harmless."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coati_rl.report.rollouts import ROLLOUTS_OF_A_STEP, Brief, choose, cut, describe, group_row, read_step
from coati_rl.report.tokens import load_tokenizer, pieces, token_fields
from coati_rl.run_reader.rollout import RecordedRollout
from coati_rl.run_reader.run_directory import LinePlace, RunDirectory
from tests.run_files import LINE, TOKENS


def briefs(*lines):
    return [Brief.of(LinePlace(None, number), RecordedRollout.of(LINE | line)) for number, line in enumerate(lines)]


def test_best_and_worst_of_the_groups_that_differ_most_come_first_then_invalid_and_truncated_ones():
    lines = [
        {"uid": f"equal-{number}", "sample": sample, "num_tokens": 9} for number in range(9) for sample in range(2)
    ]
    lines += [{"uid": "mixed", "sample": sample, "reward": reward} for sample, reward in enumerate([0.0, 0.5, 1.0])]
    lines += [{"uid": "invalid", "reward": None, "verdict": "invalid"}, {"uid": "cut", "finish_reason": "length"}]
    chosen = choose(briefs(*lines))
    assert len(chosen) == ROLLOUTS_OF_A_STEP
    keys = [each.key[1:] for each in chosen]
    assert {("mixed", 2), ("mixed", 0), ("invalid", 0), ("cut", 0)} < set(keys)
    assert keys.index(("mixed", 2)) < keys.index(("mixed", 0)), "of a prompt the best answer is first"


def test_what_people_have_noted_is_always_shown():
    lines = [{"uid": f"p{number}", "sample": sample, "reward": sample} for number in range(20) for sample in range(2)]
    assert (1, "p19", 0) in [each.key for each in choose(briefs(*lines), {(1, "p19", 0)})]


def test_a_group_counts_episodes_though_one_has_forked_into_several_trajectories():
    group = briefs(
        {"episode": 0, "sample": 0, "reward": 0.0, "num_tokens": 3},
        {"episode": 0, "sample": 1, "reward": 0.0, "num_tokens": 4, "finish_reason": "length", "is_trained": False},
        {"episode": 1, "sample": 2, "reward": None, "verdict": "invalid", "is_trained": False, "num_tokens": 1},
    )
    row = group_row(group)
    assert (row["size"], row["rewards"], row["trained"], row["invalid"], row["truncated"]) == (2, [0, None], 1, 1, 1)
    assert row["tokens"] == 4


def test_a_long_text_loses_its_middle_which_is_said_and_what_is_not_seen_is_escaped():
    text = "a" * 16_000_000 + "\x1b[2J\u202e\ud83d"
    shown = cut(text, 30)
    assert shown.startswith("a" * 20) and shown.endswith(r"\x1b[2J\u202e\ud83d")
    assert "[... 15,999,976 characters left out ...]" in shown
    assert len(shown) < 120
    assert cut("short\n", 30) == "short\n"


def test_a_conversation_has_its_turns_and_calls_of_tools():
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "python", "arguments": '{"code": 1}'}}],
        },
        {"role": "tool", "content": "2"},
    ]
    forked = {"ended": "done", "turns": [{"role": "assistant"}, {"role": "assistant", "is_fork": True}]}
    line = LINE | {"messages": messages, "environment": forked, "parent_sample": 0, "num_shared_tokens": 3}
    shown = describe(RecordedRollout.of(line), None, 4000)
    assert shown["messages"] == [["user", "1 + 1?"], ["assistant", '-> python({"code": 1})'], ["tool", "2"]]
    assert (shown["ended"], shown["num_forks"], shown["parent_sample"], shown["num_shared_tokens"]) == ("done", 1, 0, 3)
    assert shown["tokens"] is None, "they were not recorded"


def test_of_a_long_conversation_the_middle_is_left_out():
    messages = [{"role": "user", "content": str(number)} for number in range(1000)]
    shown = describe(RecordedRollout.of(LINE | {"messages": messages}), None, 4000)["messages"]
    assert [text for _, text in shown] == [*map(str, range(30)), "940 messages left out", *map(str, range(970, 1000))]


def test_each_token_has_its_text_log_probability_mask_and_version(tmp_path):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.yaml").write_text(json.dumps({"model": str(tmp_path)}))
    loaded = load_tokenizer(RunDirectory(tmp_path))
    ids = tokenizer.encode("x\u00e9\x1b").ids  # a token a byte
    line = LINE | TOKENS | {
        "token_ids": [*ids, 99_999], "rollout_logprobs": [-0.123456, 0.0, None, -1.0, -2.0],
        "loss_mask": [[True, 1], [False, 1], [True, 3]], "token_versions": [[3, 1], [-1, 1], [4, 3]],
    }  # fmt: skip
    assert token_fields(RecordedRollout.of(line), loaded, 100) == {
        "pieces": ["x", "", "\u00e9", r"\x1b", ""],
        "logprobs": [-0.1235, 0.0, None, -1.0, -2.0],
        "mask": [1, 0, 1, 1, 1],
        "versions": [3, -1, 4, 4, 4],
    }
    assert pieces([5, 7], None) == ["<5>", "<7>"], "without a tokenizer numbers stand for tokens"


def test_the_tokenizer_of_a_model_of_the_hub_is_taken_from_what_was_downloaded(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("model: some/model\n")
    assert load_tokenizer(RunDirectory(tmp_path)) is None
    Tokenizer(models.WordLevel({"word": 0}, "word")).save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(tmp_path / "tokenizer.json"))
    assert pieces([0], load_tokenizer(RunDirectory(tmp_path))) == ["word"]


def test_of_a_long_rollout_tokens_in_the_middle_are_left_out():
    number = 1000
    line = LINE | {"token_ids": [*range(number)], "rollout_logprobs": [-1.0] * number, "token_versions": [[0, number]]}
    shown = token_fields(RecordedRollout.of(line), None, 100)
    assert shown["pieces"] == [f"<{token}>" for token in [*range(70), *range(970, 1000)]]
    assert (shown["gap_at"], shown["num_left_out"], len(shown["logprobs"]), len(shown["mask"])) == (70, 900, 100, 100)


def test_ratios_that_a_replay_has_written_are_those_of_the_tokens_that_are_shown(write_run):
    number = 1000
    tokens = {"token_ids": [*range(number)], "rollout_logprobs": [-1.0] * number, "token_versions": [[0, number]]}
    run = write_run(rollouts=[tokens, {"sample": 1, **tokens}])
    (run / "token_ratios").mkdir()
    line = {"uid": "train-1.0", "sample": 1, "ratios": [1.0 + n / number for n in range(number)]}
    (run / "token_ratios" / "step-1.jsonl").write_text(json.dumps(line) + "\n")
    without, shown = read_step(RunDirectory(run), 1, max_bytes=16_000, tokenizer=None).rollouts
    assert "ratios" not in without["tokens"]
    ratios, gap = shown["tokens"]["ratios"], shown["tokens"]["gap_at"]
    assert len(ratios) == len(shown["tokens"]["pieces"]) < number
    assert (ratios[0], ratios[gap - 1], ratios[-1]) == (1.0, 1.0 + (gap - 1) / number, 1.999)


def test_a_step_is_read_within_its_bytes_and_causes_are_counted(write_run):
    long = {"response": "word " * 100_000, **TOKENS, "token_ids": [1] * 20_000, "rollout_logprobs": [-1.0] * 20_000,
            "token_versions": [[0, 20_000]]}  # fmt: skip
    invalid = {"uid": "train-2.0", "reward": None, "verdict": "invalid", "detail": "timeout"}
    run = write_run(rollouts=[{"sample": sample, **long} for sample in range(20)] + [invalid] * 3 + [{"step": 2}])
    step = read_step(RunDirectory(run), 1, max_bytes=80_000, tokenizer=None)
    assert len(step.rollouts) == ROLLOUTS_OF_A_STEP and step.num_rollouts == 23
    assert len(json.dumps(step.rollouts)) < 120_000
    assert step.causes == {"timeout": 3}
    assert [row["uid"] for row in step.groups] == ["train-1.0", "train-2.0"]


@pytest.mark.parametrize("verdict", ["ok", "wrong"])
def test_a_wrong_answer_is_not_an_invalid_one(verdict):
    assert group_row(briefs({"verdict": verdict}))["invalid"] == 0
