"""Test what the forecast takes context parallelism to change."""

from dataclasses import replace

from transformers import LlamaConfig

from coati_rl.config.cli import parse
from coati_rl.memory.activations import MicroBatchSize
from coati_rl.memory.context import context_share, gathered_key_bytes
from coati_rl.memory.model_shape import model_shape
from coati_rl.memory.run_memory import Machine, RunModels, trainer_memory

MODEL = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8, head_dim=8,
    num_key_value_heads=4,
)  # fmt: skip
SIZE = MicroBatchSize(tokens=8192, loss_tokens=6000, path_tokens=100, masked=50, longest=8192)


def test_a_rank_has_its_share_of_the_tokens_and_keeps_no_keys_of_paths():
    assert context_share(SIZE, 1) == SIZE
    assert context_share(SIZE, 4) == MicroBatchSize(tokens=2048, loss_tokens=2048, longest=8192)


def test_gathered_keys_are_those_of_the_heads_that_are_gathered_at_a_time():
    shape = model_shape(MODEL)
    assert gathered_key_bytes(shape, SIZE, 1, "cuda") == 0
    assert gathered_key_bytes(shape, SIZE, 2, "cuda") == 6 * 4 * 4 * 8192 * 8  # all 4 heads
    assert gathered_key_bytes(shape, replace(SIZE, tokens=16384), 2, "cpu") == 6 * 4 * 2 * 16384 * 8  # 2 of them
    long = MicroBatchSize(tokens=2**20, loss_tokens=1, longest=2**20)
    assert gathered_key_bytes(shape, long, 2, "cuda") == 6 * 4 * 1 * 2**20 * 8


def test_activations_of_two_ranks_that_share_rows_are_half():
    def activations(flags: str) -> int:
        config = parse(["-m", "models/mine", "-t", "2", *flags.split()])[0]
        machine = Machine(device="cuda", host_bytes=2**40, gpu_bytes=2**40)
        memory = trainer_memory(config, RunModels(policy=MODEL), SIZE, machine, has_several_micro_batches=False)
        return memory.parts["activations"]

    assert 0.49 < activations("--context-parallel 2") / activations("") < 0.51
