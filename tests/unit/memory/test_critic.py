"""Test that the forecast counts a critic beside the policy: what it holds, and not its activations."""

from transformers import Qwen3Config

from coati_rl.config.cli import build_config
from coati_rl.memory.activations import MicroBatchSize
from coati_rl.memory.model_shape import model_shape
from coati_rl.memory.run_memory import Machine, RunModels, trainer_memory

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 16, "vocab_size": 512}
SIZE = MicroBatchSize(tokens=256, loss_tokens=128, longest=64)


def parts(hf_config: Qwen3Config, critic: Qwen3Config | None, **settings: object) -> dict[str, int]:
    config = build_config({"model": "m", "dataset": "d", **settings})
    models, machine = RunModels(policy=hf_config, critic=critic), Machine(device="cpu", host_bytes=2**34)
    return trainer_memory(config, models, SIZE, machine, has_several_micro_batches=True).parts


def test_a_critic_in_float32_is_weights_gradients_and_two_moments() -> None:
    policy = Qwen3Config(**SHAPE, num_attention_heads=4, num_key_value_heads=2)
    critic = Qwen3Config(**{**SHAPE, "num_hidden_layers": 2}, num_attention_heads=4, num_key_value_heads=2)
    alone, both = parts(policy, None), parts(policy, critic)
    weights = model_shape(critic, has_scalar_head=True).num_weights
    assert both.pop("critic") == 4 * 4 * weights
    assert both == alone


def test_over_ranks_of_fsdp2_each_has_its_part() -> None:
    config = Qwen3Config(**SHAPE, num_attention_heads=4, num_key_value_heads=2)
    weights = model_shape(config, has_scalar_head=True).num_weights
    assert parts(config, config, plugin="fsdp2", num_trainers=2)["critic"] == 4 * 4 * -(-weights // 2)
