"""Test the plan for a model of 70 billion parameters, from its config alone."""

import json
import re
import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest
from transformers import AutoConfig

import rl_example
from coati_rl.errors import ConfigError
from coati_rl.memory.activations import MicroBatchSize
from coati_rl.memory.run_memory import Machine, RunModels, trainer_memory
from coati_rl.preflight.prepare import RunPreparation

LLAMA_70B = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672},
    **{"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256},
    **{"max_position_embeddings": 8192, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
}
LAYOUT = (
    "-t 32 --plugin fsdp2 -ptp 4 -i 2 -ibs 16 -imbs 8 -tbs 1 -tMbs 1 -g 4 -mpt 1024 -mnt 2048 --master_address 10.0.0.1"
)
MODEL_GIB = 70_553_706_496 * 2 / 2**30


@pytest.fixture(scope="module")
def model(model_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("large") / "llama-70b"
    shutil.copytree(model_dir, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    (directory / "config.json").write_text(json.dumps(LLAMA_70B))
    return directory


@pytest.fixture(scope="module")
def planned(model, tmp_path_factory):
    """The prepared run, lines of its plan by name, in GiB with their parts, and what was warned of."""
    directory, prepared, texts = tmp_path_factory.mktemp("rows"), [], (StringIO(), StringIO())
    row = {"messages": {"role": "user", "content": "1 + 1"}, "gt_answer": "2"}
    (directory / "prompts.jsonl").write_text(f"{json.dumps(row)}\n" * 64)
    prepare = RunPreparation.prepare

    def kept(*arguments, **settings):
        prepared.append(prepare(*arguments, **settings))
        return prepared[-1]

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(texts[0]), redirect_stderr(texts[1]):
        patch.setattr(RunPreparation, "prepare", kept)
        patch.setattr("rewards.first_prompt.is_tried", lambda spec: False)  # by a process of its own
        words = f"-m {model} -d {directory / 'prompts.jsonl'} -rt boxed --device cuda --dry-run -kl 0 {LAYOUT}"
        assert rl_example.main(words.split(), directory) == 0
    lines = re.findall(
        r"^(?:memory, |)([\w ]*(?:trainer|engine rank)) +([\d.]+) GiB(.*)$", texts[0].getvalue(), re.MULTILINE
    )
    return prepared[0], {name: (float(size), parts) for name, size, parts in lines}, texts[1].getvalue()


@pytest.mark.full
def test_70b_on_sharded_trainers_and_engines_of_4_ranks_fits_75_gib_of_a_gpu_and_a_model_of_host_memory(planned):
    _, memory, warnings = planned
    assert 0 < memory["trainer"][0] < 75 and MODEL_GIB / 4 < memory["engine rank"][0] < 75
    host, parts = memory["host of 4 x engine rank"]
    assert MODEL_GIB < host < 1.2 * MODEL_GIB
    assert "staging 131.4 GiB" in parts
    assert "the memory of the run's GPUs is unknown" in warnings


@pytest.mark.full
def test_a_sender_of_70b_holds_two_pinned_buffers_in_host_memory(planned):
    prepared, _, _ = planned
    machine = Machine(device="cuda", host_bytes=2**40)
    (trainer, with_nothing_sent) = (
        trainer_memory(
            prepared.config,
            RunModels(policy=AutoConfig.from_pretrained(prepared.config.model.model)),
            MicroBatchSize(tokens=1, loss_tokens=1, longest=1),
            machine,
            has_several_micro_batches=False,
            backend=backend,
        )
        for backend in ("nccl", None)
    )
    assert trainer.host["sent weights"] == 2 * 2**25
    sent = trainer.parts["sent weights"]
    assert sent == 2 * 2**25 + 2 * 2 * 128256 * 8192  # the embedding's rows, in parts and joined
    assert trainer.device_bytes - with_nothing_sent.device_bytes == sent


def test_the_deadline_of_its_updates_is_a_second_more_for_each_half_gigabyte(planned):
    assert planned[0].config.sync.sync_timeout_s == 60 + 282


def test_gpus_that_are_too_small_for_it_are_refused_once_they_are_known(planned):
    prepared = planned[0]
    prepared.check_gpus(80 * 2**30)
    with pytest.raises(ConfigError, match=r"engine rank needs .* of its GPU, which has 24\.0 GiB|trainer needs"):
        prepared.check_gpus(24 * 2**30)
