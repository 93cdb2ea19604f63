"""A run whose responses are scored by a reward model in an actor of its own, and what happens when that actor dies."""

import signal

import pytest
import torch

from tests.integration.runs.records import assert_complete, read_rollouts

pytestmark = pytest.mark.full


@pytest.fixture
def judge(make_tiny, tmp_path):
    """The directory of a random reward model with the tokenizer of the tiny policy."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(make_tiny(tied=True))
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    return tmp_path / "judge"


def test_a_reward_model_scores_in_the_cluster_beside_another_reward(make_tiny, start_run, flags, judge):
    from rewards.model.judgement import JudgedConversation
    from rewards.model.reward_model import RewardModel

    reward = ("-rt", f"boxed=1,model:{judge}=0.5", "--reward-devices", 2)
    run = start_run(*flags(make_tiny(tied=True)), "-b", "transformers", *reward, "--max-steps", 2)
    records = assert_complete(run, steps=2)
    samples = read_rollouts(run)
    system = "Please reason step by step, and put your final answer within \\boxed{}."
    alone = RewardModel(judge, device="cpu", dtype=torch.float32)
    for line in samples:
        messages = ({"role": "system", "content": system}, {"role": "user", "content": line["prompt"]})
        (judgement,) = alone.score([JudgedConversation(messages=messages, response=line["response"])])
        assert line["breakdown"]["judge"] == pytest.approx(judgement.reward, abs=1e-4)
        assert line["reward"] == pytest.approx(line["breakdown"]["boxed"] + 0.5 * judgement.reward, abs=1e-4)
    assert len({round(line["breakdown"]["judge"], 3) for line in samples}) > 1
    assert {record["samples_invalid"] for record in records} == {0}
    for number in (0, 1):
        assert "the reward model is ready" in (run.run_dir / "logs" / f"reward-model-{number}.log").read_text()


@pytest.mark.parametrize(
    ("how", "message"),
    [(signal.SIGKILL, "reward-model-0 died: "), (signal.SIGSTOP, "reward-model-0 hangs: no sign of")],
)
def test_a_reward_model_that_dies_or_hangs_ends_the_run(make_tiny, start_run, flags, judge, how, message):
    arguments = (*flags(make_tiny(tied=True)), "-b", "fake", "-e", 1000, "-rt", f"model:{judge}")
    run = start_run(*arguments, "--max-failure-rate", 1, "--heartbeat-timeout-s", 5)
    run.wait_for_step(1)
    (actor,) = run.processes("ray::RewardModelActor")
    actor.send_signal(how)
    assert run.wait(120) == 1, run.text()
    assert message in run.text().splitlines()[-1]
    assert run.left_over() == []
