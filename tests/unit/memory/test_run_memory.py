"""Test what a run's settings make of sizes: its micro-batch, and the processes beside trainers and engines."""

import pytest
from transformers import AutoConfig

from coati_rl.config.cli import parse
from coati_rl.memory.activations import MicroBatchSize
from coati_rl.memory.forecast import ENGINE_RANK, Forecast, ProcessMemory
from coati_rl.memory.model_shape import model_shape
from coati_rl.memory.run_memory import (
    Machine,
    RunModels,
    reward_model_memory,
    rl_micro_batch,
    scorer_memory,
    trainer_memory,
)

MACHINE = Machine(device="cpu", host_bytes=2**34)
JUDGE = AutoConfig.for_model("llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=100)


def config_of(text):
    return parse(text.split())[0]


@pytest.mark.parametrize(
    ("flags", "prompt", "masked"),
    [("", 100, 30 * 130), ("", 7, 0), ("--no-shared-prefix", 100, 0)],  # 30 tokens of a response
)
def test_responses_behind_a_prompt_take_a_mask_unless_the_prompt_is_much_shorter(flags, prompt, masked):
    config = config_of(f"-g 8 -tbs 4 -tMbs 4 -tmbs 16 {flags}")
    size, has_several = rl_micro_batch(config, prompt_tokens=prompt, response_tokens=30)
    assert size.masked == masked
    assert has_several


def test_in_turns_only_the_larger_side_counts_on_the_cpu_and_libraries_of_both():
    processes = (
        ProcessMemory(name="trainer", count=2, parts={"parameters": 70}, host={"libraries": 5}),
        ProcessMemory(name=ENGINE_RANK, count=3, parts={"KV cache": 30}, host={"libraries": 4}),
        ProcessMemory(name="reward model", count=1, parts={"parameters": 9}),
    )
    apart, in_turns = (
        Forecast(device="cpu", processes=processes, shared={"weights": 6}, takes_turns=turns) for turns in (False, True)
    )
    assert apart.host_bytes == 6 + 2 * 75 + 3 * 34 + 9
    assert in_turns.host_bytes == apart.host_bytes - 3 * 30
    assert in_turns.lines()[-1].endswith("1 x reward model, in turns; weights 0 MiB")


@pytest.mark.parametrize(("devices", "count", "on_host"), [(0, 1, True), (2, 2, False)])
def test_each_copy_of_a_reward_model_has_its_weights_where_it_computes(devices, count, on_host, tmp_path):
    config = config_of(f"-rt model:{tmp_path} --reward-devices {devices}")
    (directory,) = config.reward_models.names
    weights = model_shape(JUDGE, has_scalar_head=True).num_weights
    (on_cpu,) = reward_model_memory(config, MACHINE, {directory: JUDGE})
    assert (on_cpu.count, on_cpu.parts["parameters"]) == (count, 4 * weights)
    (in_gpu_mode,) = reward_model_memory(config, Machine(device="cuda", host_bytes=2**34), {directory: JUDGE})
    assert in_gpu_mode.device_bytes == (0 if on_host else 2 * weights)
    assert in_gpu_mode.on_host("cuda").get("parameters", 0) == (2 * weights if on_host else 0)


def test_offloaded_models_leave_a_gpu_for_host_memory_and_a_cpus_memory_for_a_file():
    size = MicroBatchSize(tokens=1 << 16, loss_tokens=1 << 15, longest=64)
    models = RunModels(policy=JUDGE, frozen={"reference": JUDGE, "teacher": JUDGE})
    weights = model_shape(JUDGE).num_weights

    def memory(device, *offload):
        config = config_of(
            f"-t 1 --precision fp32 --teacher t -kl 0.1 {' '.join(['--offload', *offload] if offload else [])}"
        )
        machine = Machine(device=device, host_bytes=2**34)
        return trainer_memory(config, models, size, machine, has_several_micro_batches=True)

    plain, of_reference, of_all = (memory("cuda", *each) for each in ((), ("reference",), ("all",)))
    assert plain.parts["frozen models"] == 8 * weights
    assert of_reference.parts["frozen models"] == 4 * weights
    assert of_all.device_bytes == plain.device_bytes - 16 * weights, "two models and two moments"
    assert (plain.host["offloaded"], of_reference.host["offloaded"], of_all.host["offloaded"]) == (
        0, 4 * weights, 16 * weights,
    )  # fmt: skip
    on_cpu = memory("cpu", "all")
    assert "offloaded" not in on_cpu.on_host("cpu")
    heap = on_cpu.parts.pop("heap")
    assert heap and on_cpu.device_bytes == memory("cpu").device_bytes - heap - 16 * weights


def test_in_turns_a_host_has_what_trainers_on_gpus_hold_between_two_steps():
    size, machine = MicroBatchSize(tokens=64, loss_tokens=32, longest=64), Machine(device="cuda", host_bytes=2**34)
    models, weights = RunModels(policy=JUDGE, frozen={"reference": JUDGE}), model_shape(JUDGE).num_weights

    def offloaded(flags):
        config = config_of(f"-t 1 -i 1 -kl 0.1 {flags}")
        return trainer_memory(config, models, size, machine, has_several_micro_batches=True).host["offloaded"]

    assert offloaded("") == 0
    # Weights and those of the reference in bfloat16, masters and two moments in float32, offloaded before or not.
    for flags in ("", "--offload optimizer", "--offload reference", "--offload all"):
        assert offloaded(f"--colocate {flags}") == (2 + 2 + 3 * 4) * weights


def test_a_reference_on_devices_of_its_own_is_the_scorers_memory_and_not_the_trainers():
    size, machine = MicroBatchSize(tokens=64, loss_tokens=32, longest=64), Machine(device="cuda", host_bytes=2**34)
    models, weights = RunModels(policy=JUDGE, frozen={"reference": JUDGE}), model_shape(JUDGE).num_weights
    config = config_of("-t 1 --precision fp32 -kl 0.1 --ref-devices 2")
    assert trainer_memory(config, models, size, machine, has_several_micro_batches=True).parts["frozen models"] == 0
    (scorer,) = scorer_memory(config, models, size, machine)
    assert (scorer.name, scorer.count, scorer.parts["parameters"]) == ("scorer", 2, 4 * weights)
    assert scorer_memory(config_of("-t 1 -kl 0.1"), models, size, machine) == []


def test_the_whole_divergence_from_a_teacher_needs_its_logits_and_its_head_where_it_is_elsewhere():
    size, machine = MicroBatchSize(tokens=64, loss_tokens=32, longest=64), Machine(device="cuda", host_bytes=2**34)
    models, shape = RunModels(policy=JUDGE, frozen={"teacher": JUDGE}), model_shape(JUDGE)

    def of_teacher(flags):
        config = config_of(f"-t 1 --precision fp32 --teacher t {flags}")
        return trainer_memory(config, models, size, machine, has_several_micro_batches=True).parts["teacher's loss"]

    states, logits = 2 * 4 * 32 * shape.hidden, 4 * 32 * shape.vocabulary  # a chunk takes all 32 tokens
    assert of_teacher("") == 0
    assert of_teacher("--distill-kl full") == states + logits
    assert of_teacher("--distill-kl full --ref-devices 1") == states + logits + 4 * shape.vocabulary * shape.hidden
