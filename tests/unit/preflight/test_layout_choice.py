"""Test what a run on GPUs takes where layout and share are open: it fits, it can be pinned, what was given stays."""

import re

import make_gpu_plans as plans
import pytest
import yaml
from transformers import MixtralConfig, PretrainedConfig

from coati_rl.config.cli import parse, parse_job
from coati_rl.config.commands import OFFLINE
from coati_rl.config.gpu_rules import with_device_defaults
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError
from coati_rl.memory.layouts import PLAIN
from coati_rl.preflight.layout_choice import with_choices

GIB = 2**30
OF_EXPERIMENT = "-g 8 -mpt 1024 -mnt 4096"
MIXTRAL = "Mixtral-8x22B"
OF_8X22B = {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48}
SPLITS = {8: (4, 4, 1), 16: (8, 4, 2), 64: (32, 8, 4)}  # GPUs: trainers, engines, ranks of an engine


def run_of(flags: str, num_gpus: int = 8):
    """Return a config of a run on so many GPUs, elsewhere, and the names of what was given of its sizes."""
    trainers, engines, width = SPLITS[num_gpus]
    sizes = f"-t {trainers} -i {engines} -ptp {width} -tbs {8 * engines} -ibs {8 * trainers}"
    config = parse(f"{sizes} {OF_EXPERIMENT} --master_address 10.0.0.1 {flags}".split())[0]
    return with_device_defaults(config, "cuda"), config.parallel.model_fields_set


def chosen(flags: str, *, model: str = "Qwen2.5-7B", num_gpus: int = 8, gpu_gib: int | None = 80):
    """Return the config with what was chosen, and the plan's line; empty if there is none."""
    config, given = run_of(flags, num_gpus)
    hf_config = MixtralConfig(**OF_8X22B) if model == MIXTRAL else plans.hf_config_of(model)
    config, lines = with_choices(
        config,
        hf_config,
        "cuda",
        given=given,
        memory_check=plans.check_of_run(hf_config),
        gpu_memory=None if gpu_gib is None else gpu_gib * GIB,
    )
    return config, "".join(lines)


def layout(config):
    return {name: value for name, value in config.parallel.model_dump().items() if PLAIN.get(name, value) != value}


GIVEN = ("-zero 1", "-tp 2", "--plugin fsdp2", "--gpu-memory-utilization 0.5 -kl 0", "-tmbs 2")
CASES = [("Qwen2.5-7B", 8)]
CASES += [case for model in plans.MODELS for num_gpus in SPLITS if (case := (model, num_gpus)) not in CASES]
OF_SIZES = (CASES[0], ("Qwen2.5-72B", 64))
FAST = [*((*case, "") for case in OF_SIZES), *((*CASES[0], flags) for flags in GIVEN)]
PRODUCT = [(*case, flags) for case in CASES for flags in ("", *GIVEN)]
PRODUCT = [each if each in FAST else pytest.param(*each, marks=pytest.mark.full) for each in PRODUCT]


@pytest.mark.parametrize(("model", "num_gpus", "flags"), PRODUCT)
def test_what_is_chosen_is_accepted_by_the_check_that_refuses_and_nothing_given_changes(model, num_gpus, flags):
    before, given = run_of(flags, num_gpus)
    config, line = chosen(flags, model=model, num_gpus=num_gpus)
    values, were = config.flat(), before.flat()
    open_ones = {*PLAIN, "gpu_memory_utilization", "max_tokens_per_microbatch", "gradient_checkpointing"}
    assert {name for name in values if values[name] != were[name]} <= open_ones - given
    if {*PLAIN} & given:
        assert {name: values[name] for name in PLAIN} == {name: were[name] for name in PLAIN}
    assert line or "gpu_memory_utilization" in given
    hf_config = plans.hf_config_of(model)
    checked = plans.check_of_run(hf_config)(config, plans.MACHINE)
    refusal, warnings = "", []
    try:
        _, warnings = checked.run()
    except ConfigError as error:
        refusal = str(error)
    needs = r"needs [\d.]+ GiB of its GPU, which has 80\.0 GiB .*(nearest: -|-t \d+ --plugin fsdp2.* holds it)"
    assert not refusal or re.search(needs, refusal)
    of_32b = 16 if "-kl 0" in flags else 64  # without a reference model a trainer has room for the policy's shards
    fits = {"Qwen3-0.6B": 8, "Qwen2.5-7B": 8, "Qwen2.5-32B": of_32b, "Qwen2.5-72B": 64, "Llama-70B": 64}
    if not {*PLAIN} & given and "-tmbs" not in flags:
        assert (not refusal and not warnings) == (num_gpus >= fits[model])


@pytest.mark.parametrize(("model", "fits"), [("Qwen3-0.6B", True), ("Qwen2.5-7B", False), ("Qwen2.5-72B", False)])
def test_on_one_gpu_a_small_model_is_fine_tuned_whole_and_a_large_one_is_told_how_many_it_takes(model, fits):
    config = parse_job(["--master_address", "10.0.0.1"], OFFLINE["sft"])[0]
    hf_config = plans.hf_config_of(model)
    config, lines = with_choices(
        with_device_defaults(config, "cuda"),
        hf_config,
        "cuda",
        given=(),
        memory_check=plans.check_of_job(hf_config),
        gpu_memory=80 * GIB,
    )
    checked = plans.check_of_job(hf_config)(config, plans.MACHINE)
    assert layout(config) == {}
    if fits:
        assert lines[0].endswith("-zero 0: one trainer") and checked.run()[1] == []
    else:
        with pytest.raises(ConfigError, match=r"-t \d+ --plugin fsdp2 holds it on GPUs of 80\.0 GiB"):
            checked.run()


@pytest.mark.parametrize(
    ("flags", "model", "expected"),
    [
        ("", "Qwen3-0.6B", {"zero_stage": 1}),
        ("--precision fp32", "Qwen3-0.6B", {}),  # ZeRO keeps masters of bfloat16 weights
        ("", "Qwen2.5-7B", {"plugin": "fsdp2"}),
        ("--precision fp32", "Qwen2.5-7B", {"plugin": "fsdp2"}),
        ("--optimizer mine.py:make", "Qwen2.5-7B", {}),  # which may need whole parameters
    ],
)
def test_the_fastest_layout_that_fits_is_taken(flags, model, expected):
    config, _ = chosen(flags, model=model)
    assert layout(config) == expected


def test_rows_are_shared_where_one_sample_fits_no_trainer_by_as_few_as_it_takes():
    config, line = chosen("-mnt 130000 -kl 0", model="Qwen2.5-7B", num_gpus=16)
    assert layout(config) == {"plugin": "fsdp2", "context_parallel_size": 2}
    assert "--plugin fsdp2 --context-parallel 2 " in line and "(-zero 1 needs" in line


def test_the_parts_of_matrices_are_sharded_where_neither_alone_fits_and_rows_stay_whole():
    config, line = chosen("-mnt 30000 -kl 0 --context-parallel 1", model="Qwen2.5-32B", num_gpus=16, gpu_gib=94)
    assert layout(config) == {"plugin": "fsdp2", "tensor_parallel_size": 4}
    assert "chosen                  --plugin fsdp2 -tp 4 " in line


def test_experts_are_shared_out_where_a_whole_layer_of_them_cannot_be_gathered():
    config, line = chosen("-kl 0", model=MIXTRAL, num_gpus=64, gpu_gib=110)
    assert layout(config) == {"plugin": "fsdp2", "expert_parallel_size": 4}
    assert "--plugin fsdp2 --expert-parallel 4 " in line
    assert layout(chosen("-kl 0", model=MIXTRAL, num_gpus=64, gpu_gib=180)[0]) == {"plugin": "fsdp2"}


def test_a_budget_that_was_not_given_is_lowered_before_memory_is_used_up_and_one_that_was_stays():
    config, line = chosen("", model="Qwen2.5-72B", num_gpus=64)
    tokens = config.parallel.max_tokens_per_microbatch
    assert 5120 <= tokens < 16384 and f" --max-tokens-per-microbatch {tokens} " in line
    config, line = chosen(
        "--max-tokens-per-microbatch 16384 -kl 0 --context-parallel 1", model="Qwen2.5-72B", num_gpus=64
    )
    assert config.parallel.max_tokens_per_microbatch == 16384 and "that fits GPUs of 80.0 GiB (" in line


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen2.5-7B", "Qwen2.5-72B"])
def test_the_flags_of_the_line_pin_what_was_chosen(model):
    config, line = chosen("", model=model, num_gpus=64)
    flags = line.removeprefix("chosen").partition(": ")[0]
    pinned, again = chosen(flags, model=model, num_gpus=64)
    assert again == ""
    assert pinned == config


def test_gpus_that_are_unknown_are_taken_to_have_80_gib_and_known_ones_are_not():
    unknown, line = chosen("", gpu_gib=None)
    assert layout(unknown) == layout(chosen("")[0]) and line.endswith("have 80.0 GiB, as theirs is unknown")
    assert layout(chosen("", gpu_gib=180)[0]) == {"zero_stage": 1}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_architecture_that_is_not_counted_and_a_cpu_keep_the_defaults(device):
    config, given = run_of("")
    hf_config = plans.hf_config_of("Qwen2.5-7B") if device == "cpu" else PretrainedConfig()
    found = with_choices(config, hf_config, device, given=given, memory_check=plans.check_of_run(hf_config))
    assert found == (config, ())


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ({"num_trainers": 4, "tensor_parallel_size": 2}, {"tensor_parallel_size": 2}),  # as many: dp stays
        ({"num_trainers": 4, "context_parallel_size": 2}, {"context_parallel_size": 2}),
        ({"num_trainers": 4}, {}),  # a run that wrote none had a plain one
        ({"num_trainers": 4, "tensor_parallel_size": 3}, {"zero_stage": 1}),  # which does not divide the heads
        ({"num_trainers": 2, "tensor_parallel_size": 2}, {"zero_stage": 1}),
    ],
)
def test_a_resumed_run_keeps_its_layout_if_it_has_as_many_trainers(tmp_path, before, expected):
    checkpoint = tmp_path / "run" / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(before))
    config, line = chosen(f"-cp {checkpoint}", model="Qwen3-0.6B")
    assert layout(config) == expected
    assert ("the layout of the run that is resumed" in line) == ("zero_stage" not in expected)


def test_engines_that_are_too_narrow_are_refused_with_a_width_that_fits_on_as_many_gpus():
    config, given = run_of("-ptp 1 -i 32 -tbs 8 -ibs 8", num_gpus=64)
    hf_config = plans.hf_config_of("Qwen2.5-72B")
    check = plans.check_of_run(hf_config)
    config, _ = with_choices(config, hf_config, "cuda", given=given, memory_check=check, gpu_memory=80 * GIB)
    assert layout(config) == {"plugin": "fsdp2"}  # the trainers' choice does not depend on the engines
    checked = check(config, plans.MACHINE)
    with pytest.raises(ConfigError, match=r"engine rank needs .*; nearest: -ptp 2 -i 16 -ibs 16, or -ptp 4 -i 8"):
        checked.run()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("-t 32 --plugin fsdp2 -i 1 -ibs 32 -tbs 1", "-ptp 2"),  # the engine's rank alone is too large
        ("-t 8 -pp 2 -zero 1 -i 1 -ptp 8 -ibs 32 -tbs 8", "-t 32 --plugin fsdp2 -pp 1 -zero 0 -tbs 1"),
        ("-t 4 -tp 4 -i 1 -ptp 8 -ibs 32 -tbs 32", "-t 32 --plugin fsdp2 -tp 1 -tbs 1"),
    ],
)
def test_what_holds_a_model_that_does_not_fit_is_accepted_with_the_flags_that_were_given(flags, named):
    hf_config = plans.hf_config_of("Qwen2.5-72B")

    def checked(text):
        config = parse(f"-g 8 -mpt 512 -mnt 512 -kl 0 -tMbs 1 --master_address 10.0.0.1 {text}".split())[0]
        check(config)
        return plans.check_of_run(hf_config)(with_device_defaults(config, "cuda"), plans.MACHINE)

    with pytest.raises(ConfigError) as caught:
        checked(flags).run()
    found = re.search(r"more memory: (.*) holds it on GPUs of 80\.0 GiB", str(caught.value))[1]
    assert found.startswith(named)
    assert checked(f"{flags} {found}").run()[1] == []
