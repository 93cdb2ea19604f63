"""Test that what is trained of episodes of several turns is what a real engine sampled, whatever happens between turns.

A thousand episodes of real chat templates, with tools and without, in which the conversation goes on, forks and
branches, while the weights change in the middle of answers.
"""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from coati_rl.algorithms.advantage import group_norm
from coati_rl.batching.group_rules import GroupRules
from coati_rl.batching.packing import pack
from coati_rl.batching.sample_builder import build_samples
from consumer.models.policy_model import load_policy, make_input, policy_forward
from producer.environments.chat import TemplateError
from tests.integration.engines.engine_process import hosted_engine
from tests.integration.engines.harness import TIMEOUT_S, Harness, request
from tests.unit.producer.chat_families import tokenizers_of_one_vocabulary
from tests.unit.producer.random_episodes import MOVES, Play, check_context, check_group, check_trajectories

FAMILIES = ("qwen2_5", "qwen3", "llama3", "gemma3", "deepseekv3", "glm4moe", "phi3", "mistral_v7")
NUM_EPISODES = 1000
NUM_TURNS = 4
MAX_MODEL_LEN = 1024
MAX_NEW_TOKENS = 12
CPU = torch.device("cpu")


def save_checkpoint(directory: Path, seed: int, tokenizers: dict) -> Path:
    """Two layers of width 64 with random weights; any family's end of a turn ends an answer."""
    torch.manual_seed(seed)
    first = tokenizers[FAMILIES[0]]
    config = Qwen3Config(
        vocab_size=len(first),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    model.generation_config.eos_token_id = sorted({tokenizer.eos_token_id for tokenizer in tokenizers.values()})
    model.save_pretrained(directory)
    first.save_pretrained(directory)
    return directory


def next_context(play: Play) -> bool:
    """Go on; False if the episode is over: refused by the template, or too long for the engine."""
    try:
        play.move(play.random.choice(MOVES))
    except TemplateError:
        return False
    check_context(play, play.context)
    return len(play.context.token_ids) <= MAX_MODEL_LEN - MAX_NEW_TOKENS


def answer_all(plays: list[Play], harness: Harness, turn: int) -> None:
    """Have the engine answer in each context, and change its weights while it does."""
    asked = {}
    for number, play in enumerate(plays):
        temperature = play.random.choice((0.6, 1.0, 1.3))
        limits = {"temperature": temperature, "seed": play.seed * 100 + turn}
        one = request(f"{turn}/{number}", play.context.token_ids, max_new_tokens=MAX_NEW_TOKENS, **limits)
        harness.engine.submit(one)
        asked[one.request_id] = (play, temperature)
    for number, (request_id, (play, temperature)) in enumerate(asked.items()):
        if number % (len(plays) // 3 + 1) == 0:
            harness.sync(1 - harness.serving, in_flight=True)
        result = harness.engine.result(request_id, TIMEOUT_S)
        assert result.error is None
        (completion,) = result.completions
        message = {"role": "assistant", "content": completion.text}
        if play.with_tools and play.random.random() < 0.4:
            call = {"id": "call12345", "function": {"name": "add", "arguments": {"a": 17, "b": 25}}}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        play.record(completion, temperature=temperature, message=message)


@torch.no_grad()
def trainer_gaps(plays: list[Play], harness: Harness, checkpoints: list[Path]) -> np.ndarray:
    """float32[N]: |trainer - record| of each trained token, nats, by the weights that sampled it; packed."""
    samples = []
    for play in plays:
        group = check_group(play.tree.trajectories(), play.prompt)
        rules = GroupRules(max_new_tokens=MAX_NEW_TOKENS * NUM_TURNS)
        samples += build_samples(group, rules=rules, loss_variation="token_level", estimator=group_norm)
    models = [load_policy(path, dtype=torch.float32) for path in checkpoints]
    gaps = []
    for micro_batch in pack(samples, max_samples=16, max_tokens=2048)[0]:
        arrays = micro_batch.loss_arrays
        scored = [policy_forward(model, make_input(micro_batch, device=CPU))[0].numpy() for model in models]
        found = np.full(arrays["rollout_logprobs"].shape, np.nan, dtype=np.float32)
        for version, checkpoint in harness.checkpoint_of.items():
            found = np.where(arrays["policy_version"] == version, scored[checkpoint], found)
        gaps.append(np.abs(found - arrays["rollout_logprobs"])[arrays["loss_mask"]])
    return np.concatenate(gaps)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_a_thousand_episodes_are_trained_as_the_engine_sampled_them(backend, tmp_path):
    tokenizers = tokenizers_of_one_vocabulary(FAMILIES)
    checkpoints = [save_checkpoint(tmp_path / str(seed), seed, tokenizers) for seed in (0, 1)]
    chosen = random.Random(0)
    plays = []
    for seed in range(NUM_EPISODES):
        family = chosen.choice(FAMILIES)
        with_tools = family in ("qwen3", "mistral_v7") and chosen.random() < 0.3
        plays.append(Play(family, seed, with_tools=with_tools, tokenizer=tokenizers[family]))
    settings = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 64, "policy_version": 0}
    with hosted_engine(backend, model=str(checkpoints[0]), **settings) as engine:
        harness = Harness(engine, checkpoints)
        going = plays
        for turn in range(NUM_TURNS):
            answer_all(going, harness, turn)
            going = [play for play in going if turn < NUM_TURNS - 1 and next_context(play)]
        harness.sender.close()
    for play in plays:
        check_trajectories(play.log, play.tree.trajectories(), play.prompt)
    answers = [said.completion for play in plays for said in play.log]
    assert sum(len(set(answer.policy_versions.tolist())) > 1 for answer in answers) > NUM_EPISODES / 100
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    assert sum(play.forks for play in plays) > NUM_EPISODES / 4
    gaps = trainer_gaps(plays, harness, checkpoints)
    assert len(gaps) == sum(len(answer.token_ids) for answer in answers)
    assert gaps.max() < 1e-4
