"""Test the preparation of a run's inputs from checked flags, and the refusal of wrong files and devices."""

import copy
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from coati.settings import trainer_config
from coati_rl.config.cli import parse
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError
from coati_rl.preflight import resources
from coati_rl.preflight.prepare import RunPreparation
from coati_rl.preflight.prompts import RewardFacts
from coati_rl.preflight.size_checks import resolve_device
from consumer.parallel.layout_rules import check_layout
from consumer.proofs.model import try_model

SIZES = "-t 1 -i 1 -ibs 2 -imbs 1 -tbs 2 -tMbs 1 -tmbs 1 -g 2 -mpt 128 -mnt 64"


@pytest.fixture
def dataset(tmp_path):
    def write(num_rows, name="train.jsonl", length=4):
        row = {"messages": {"role": "user", "content": "x" * length}, "gt_answer": "1"}
        (tmp_path / name).write_text(f"{json.dumps(row)}\n" * num_rows)
        return str(tmp_path / name)

    return write


@pytest.fixture
def prepare_with(model_dir, dataset):
    def run(flags="", *, num_rows=8, is_dry_run=False, model=None, system_prompt="Be brief.", needs_truth=False):
        argv = ["-m", str(model or model_dir), "-d", dataset(num_rows), *SIZES.split(), *flags.split()]
        config = parse(argv)[0]
        check(config)
        return RunPreparation(
            rewards=RewardFacts(
                default_system_prompt=lambda reward_type: system_prompt,
                needs_ground_truth=lambda reward_type: needs_truth,
            ),
            check_layout=check_layout,
            try_model=try_model,
            is_dry_run=is_dry_run,
        ).prepare(config)

    return run


@pytest.fixture
def num_gpus(monkeypatch):
    def pretend(number):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        gpu = SimpleNamespace(total_memory=80 * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)

    pretend(0)
    return pretend


@pytest.fixture
def refusal(prepare_with):
    def run(flags="", **options):
        with pytest.raises(ConfigError) as caught:
            prepare_with(flags, **options)
        return str(caught.value)

    return run


def test_a_run_starts_with_tokenised_prompts_a_plan_and_a_model_directory(prepare_with, num_gpus, model_dir):
    prepared = prepare_with()
    assert prepared.config.model.model == str(model_dir)
    assert len(prepared.train.prompts) == 8
    assert (prepared.plan.device, prepared.plan.num_steps, prepared.warnings) == ("cpu", 4, ())


def test_the_users_system_prompt_goes_before_the_reward_types(prepare_with, num_gpus):
    lengths = [len(prepare_with(flags).train.prompts[0].token_ids) for flags in ("", "-s Hm.", "--system-prompt=")]
    assert lengths == [len("s:Be brief.\nu:xxxx\na:"), len("s:Hm.\nu:xxxx\na:"), len("u:xxxx\na:")]


def test_evaluation_sets_are_read_too_and_may_have_any_name(prepare_with, dataset, num_gpus):
    tasks = json.dumps({"train": dataset(3, "eval.jsonl")}, separators=(",", ":"))
    prepared = prepare_with(f"-ed {tasks} -ei 1")
    assert [prompt.purpose for prompt in prepared.evaluation["train"].prompts] == ["eval"] * 3
    assert prepared.warnings == ()
    assert prepare_with(f"-ed {tasks}").warnings == ("--eval-dataset is not evaluated: --eval-interval is -1 (off)",)


def test_a_cut_distribution_is_warned_of(prepare_with, num_gpus):
    for flags in ("-topk 5", "-topp 0.9"):
        assert ["trainer recomputes old_logprobs" in warning for warning in prepare_with(flags).warnings] == [True]


def test_too_few_prompts_for_a_step_name_two_ways_out_that_pass(refusal, prepare_with, num_gpus):
    # 4 prompts a step and 3 there are: two episodes, or steps of the largest divisor of ibs = 4 below 3.
    flags = "-tbs 4 -tMbs 4 -ibs 4"
    message = refusal(flags, num_rows=3)
    assert "3 usable prompts x 1 episode(s) do not fill one optimizer step of tbs * dp = 4 prompts" in message
    assert message.endswith("nearest: -e 2 or -tbs 2 -tMbs 2")
    for way_out in ("-e 2", "-tbs 2 -tMbs 2"):
        assert prepare_with(f"{flags} {way_out}", num_rows=3).plan.num_steps >= 1


def test_prompts_that_are_all_too_long_are_refused(refusal, num_gpus):
    assert "--dataset: all 8 prompts exceed --max-prompt-tokens 5" in refusal("-mpt 5")


def test_samples_longer_than_the_models_positions_are_refused(refusal, prepare_with, num_gpus):
    assert "-mpt 128 + -mnt 900 = 1028 tokens exceed the 1024 positions" in refusal("-mnt 900")
    assert refusal("-mnt 900").endswith("nearest: -mnt 896")
    prepare_with("-mnt 896")
    assert refusal("-mpt 1100").endswith("nearest: -mpt 512 -mnt 64")
    longest = "--max-episode-tokens 1025"
    assert f"{longest} tokens exceed the 1024 positions" in refusal(f"{longest} -mnt 900")
    assert refusal(f"{longest} -mnt 900").endswith("nearest: --max-episode-tokens 1024")
    prepare_with(longest)  # -mpt and -mnt are shorter
    assert refusal(f"{longest} -mpt 1024").endswith("nearest: --max-episode-tokens 1024 -mpt 512")


def test_a_model_that_is_not_there_is_refused(refusal, tmp_path, num_gpus):
    assert "no such directory; give a model directory or a hub id" in refusal(model=tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "the directory has no config.json" in refusal(model=tmp_path / "empty")


TEMPLATES = ("--chat-template chatml", "--input-template Q:{}")


def test_a_model_without_a_chat_template_is_refused_unless_it_is_given_one(
    refusal, prepare_with, tmp_path, model_dir, tokenizer, num_gpus
):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    directory = tmp_path / "plain"
    shutil.copytree(model_dir, directory)
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    plain.save_pretrained(directory)
    message = refusal(model=directory)
    assert "the tokenizer has no chat template" in message and "--chat-template chatml" in message
    rendered = [prepare_with(flag, model=directory).train.prompts[0].rendered for flag in TEMPLATES]
    assert rendered[0].startswith("<|im_start|>") and rendered[1].startswith("Q:x")
    assert "<|im_start|>" in prepare_with(TEMPLATES[0], model=directory).config.data.chat_template


def test_a_dry_run_plans_without_fetching_the_model(prepare_with, num_gpus):
    prepared = prepare_with(model="owner/model", is_dry_run=True)
    assert prepared.plan.num_steps == 4
    assert prepared.warnings == ("model owner/model is not on this machine: prompt lengths are not checked",)


def test_a_dry_run_without_the_model_says_that_it_does_not_know_whether_it_can_be_split(prepare_with, num_gpus):
    (warning,) = prepare_with("-t 2 -tp 2", model="owner/model", is_dry_run=True).warnings
    assert warning == "model owner/model is not on this machine: prompt lengths, -tp and -pp are not checked"


def test_a_layout_that_the_model_cannot_have_is_refused(refusal, num_gpus):
    # The model has one layer and 2 heads, but a single key-value head.
    assert refusal("-t 2 -tp 2").startswith("-tp 2: must divide num_key_value_heads 1; use -tp 1 (--model ")
    assert refusal("-t 2 -pp 2").startswith("-pp 2: more stages than num_hidden_layers 1; use -pp 1 or less (--model ")


@pytest.mark.parametrize(
    ("flags", "gpus", "warnings"),
    [
        ("-t 2 -tbs 1 -zero 1", 0, ("-zero 1 sets --precision bf16: ZeRO keeps float32 masters of bfloat16 weights",)),
        ("-t 2 -tbs 1 -zero 2 --precision bf16", 0, ()),
        ("-t 2 -tbs 1 -zero 1", 3, ()),  # on GPUs it is bf16 anyway
        (
            "-t 1 -zero 1 --precision bf16",
            0,
            ("-zero 1: has no effect, as there is one data-parallel rank",),
        ),
    ],
)
def test_zero_that_chooses_the_precision_says_so(prepare_with, num_gpus, monkeypatch, flags, gpus, warnings):
    num_gpus(gpus)
    monkeypatch.setattr(resources, "_has_bf16_products", lambda: True)
    prepared = prepare_with(flags)
    assert (prepared.plan.precision, prepared.warnings) == ("bf16", warnings)


@pytest.mark.parametrize(
    ("flags", "gpus", "remedies"),
    [
        ("--precision bf16", 0, ["--precision fp32"]),
        ("-t 2 -tbs 1 -zero 2 --precision bf16", 0, ["--precision fp32 with -zero 0"]),
        ("", 0, []),
        ("--precision bf16", 2, []),
    ],
)
def test_bf16_on_a_cpu_without_instructions_for_it_is_said_to_be_slow(
    prepare_with, num_gpus, monkeypatch, flags, gpus, remedies
):
    num_gpus(gpus)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    said = "--precision bf16: this CPU lacks bfloat16 instructions and computes it several times slower than "
    assert prepare_with(flags).warnings == tuple(said + remedy for remedy in remedies)


def test_the_librarys_trainer_says_it_too(model_dir, monkeypatch, caplog):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    trainer_config(model_dir, "sft", num_trainers=1, device="cpu", precision="bf16")
    assert "this CPU lacks bfloat16 instructions" in caplog.text


def test_a_single_trainer_has_nobody_to_share_a_model_with(prepare_with, num_gpus):
    num_gpus(0)
    warning = "--plugin fsdp2: shards nothing, as there is one trainer"
    assert prepare_with("-t 1 --plugin fsdp2").warnings == (warning,)
    assert prepare_with("-t 2 -tbs 1 --plugin fsdp2").warnings == ()


def test_gpus_are_taken_when_there_are_enough_and_bf16_with_them(prepare_with, num_gpus):
    num_gpus(2)
    plan = prepare_with().plan
    assert (plan.device, plan.precision, plan.num_devices) == ("cuda", "bf16", 2)
    assert prepare_with("--device cpu").plan.device == "cpu"


def test_on_gpus_the_config_has_the_layout_that_the_plan_chose_and_says_and_on_the_cpu_the_defaults(
    prepare_with, num_gpus
):
    num_gpus(3)
    flags = "-t 2 -tbs 1 -tMbs 1"
    prepared = prepare_with(flags)
    parallel = prepared.config.parallel
    assert (parallel.zero_stage, parallel.gpu_memory_utilization) == (1, 0.9)
    assert prepared.plan.config == prepared.config
    (line,) = [each for each in prepared.plan.lines() if each.startswith("chosen")]
    assert "-zero 1 --gpu-memory-utilization 0.9: the fastest layout that fits GPUs of 80.0 GiB" in line
    given = prepare_with(f"{flags} --plugin fsdp2 --gpu-memory-utilization 0.6").config.parallel
    assert (given.plugin, given.zero_stage, given.gpu_memory_utilization) == ("fsdp2", 0, 0.6)
    num_gpus(0)
    on_cpu = prepare_with(flags)
    defaults = on_cpu.config.parallel
    without = prepare_with(f"{flags} --device cuda", is_dry_run=True, model="no-such/model")
    assert without.warnings[-1] == "the layout of the trainers is chosen when the model is here"
    assert (defaults.plugin, defaults.zero_stage, defaults.gpu_memory_utilization) == ("hybrid", 0, 0.85)
    assert not [each for each in on_cpu.plan.lines() if each.startswith("chosen")]


def test_more_devices_than_the_machine_has_are_refused_with_flags_that_fit(refusal, prepare_with, num_gpus):
    num_gpus(3)
    message = refusal("-i 2 -t 2 -ptp 1")
    assert "GPUs = P * ptp + T: 2 * 1 + 2 = 4 are needed, this machine has 3" in message
    flags = re.search(r"nearest: ([^;]*);", message).group(1)
    assert prepare_with(f"-i 2 -t 2 {flags}").plan.num_devices <= 3
    wide = re.search(r"nearest: ([^;]*);", refusal("-ptp 4")).group(1)
    assert prepare_with(f"-ptp 4 {wide}").plan.num_devices <= 3


def test_one_gpu_is_enough_for_a_run_in_turns_which_the_message_names(refusal, prepare_with, num_gpus):
    num_gpus(1)
    message = refusal("-i 1 -t 1 --device cuda")
    assert "GPUs = P * ptp + T: 1 * 1 + 1 = 2 are needed, this machine has 1; use --colocate -nb 0 with -t 1" in message
    assert prepare_with("-i 1 -t 1 --colocate -nb 0 --device cuda").plan.num_devices == 1
    assert "GPUs = T: 2 = 2 are needed, this machine has 1" in refusal("-i 2 -t 2 --colocate -nb 0 --device cuda")


@pytest.mark.parametrize("flags", ["-t 4 -tp 2", "-t 4 -tp 2 -pp 2", "-t 8 -pp 2 -ptp 2", "-t 8 -tp 8 -ptp 8"])
@pytest.mark.parametrize("available", [2, 3, 4, 5])
def test_flags_that_fit_keep_the_trainers_layout_where_they_can(num_gpus, flags, available):
    num_gpus(available)
    argv = [*SIZES.replace("-ibs 2", "-ibs 16").split(), *flags.split(), "-i", "2"]
    with pytest.raises(ConfigError) as caught:
        resolve_device(parse(argv)[0], is_dry_run=False)
    nearest = re.search(r"nearest: ([^;]*);", str(caught.value)).group(1)
    config = parse([*argv, *nearest.split()])[0]
    check(config)
    assert resolve_device(config, is_dry_run=False) == ("cuda", [])
    assert ("-tp 1" in nearest) == (parse(argv)[0].parallel.num_trainers // parse(argv)[0].dp >= available)


def test_gpus_are_needed_only_to_run_not_to_plan(prepare_with, refusal, num_gpus):
    assert "use --device cpu" in refusal("--device cuda")
    prepared = prepare_with("--device cuda -i 8", is_dry_run=True)
    assert prepared.plan.num_devices == 9
    missing, memory = [each for each in prepared.warnings if "GPU" in each]
    assert missing == "GPUs = P * ptp + T: 8 * 1 + 1 = 9 are needed, this machine has 0"
    assert "the memory of the run's GPUs is unknown: a trainer needs" in memory


def test_what_does_not_fit_a_clusters_gpus_is_refused_when_they_are_known(prepare_with, num_gpus):
    prepared = prepare_with("--master_address 10.0.0.1")
    assert any("GPUs is unknown" in each for each in prepared.warnings)
    prepared.check_gpus(80 * 2**30)
    with pytest.raises(ConfigError, match=r"a trainer needs .* of its GPU, which has 1 MiB .*; no other settings"):
        prepared.check_gpus(2**20)


def test_a_clusters_gpus_are_counted_when_it_is_joined(prepare_with, num_gpus):
    assert prepare_with("--master_address 10.0.0.1").plan.device == "cuda"
