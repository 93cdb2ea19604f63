"""Test what a user sees of the forecast: lines of the plan, a refusal with flags that fit, and a warning."""

import json
import re
import shutil

import pytest

import rl_example
from coati_rl.config.commands import OFFLINE
from consumer.__main__ import _main as train_on_dataset

MIB = 2**20
SIZES = "-i 1 -t 1 -ibs 8 -imbs 8 -tbs 8 -tMbs 8 -g 4 -mpt 128 -mnt 128 -kl 0"
SHAPE = {
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 32},
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def large_model(model_dir, tmp_path_factory):
    """A model whose weights are not there: a plan needs its sizes alone."""
    directory = tmp_path_factory.mktemp("large") / "model"
    shutil.copytree(model_dir, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **SHAPE, "layer_types": None}))
    return directory


@pytest.fixture
def rows(tmp_path):
    prompts, texts = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    prompts.write_text(json.dumps({"messages": {"role": "user", "content": "1 + 1"}, "gt_answer": "2"}) + "\n" * 1)
    prompts.write_text(prompts.read_text() * 64)
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer " * 20}]
    texts.write_text((json.dumps({"messages": turns}) + "\n") * 64)
    return prompts, texts


@pytest.fixture
def dry_run(large_model, rows, tmp_path, capsys, monkeypatch):
    """(flags) -> exit code, output and errors of a run on the CPU of a machine with so many MiB available."""

    def run(flags, *, available_mib):
        monkeypatch.setattr("coati_rl.preflight.memory_check.available_bytes", lambda: available_mib * MIB)
        monkeypatch.setattr("rewards.first_prompt.is_tried", lambda spec: False)  # by a process of its own
        words = ["-m", str(large_model), "-d", str(rows[0]), "-rt", "boxed", "--device", "cpu", "--dry-run"]
        code = rl_example.main([*words, *SIZES.split(), *flags.split()], tmp_path)
        printed = capsys.readouterr()
        told = [line for line in printed.err.splitlines(keepends=True) if "has no weights yet" not in line]
        return code, printed.out, "".join(told)

    return run


@pytest.mark.full
def test_a_plan_says_the_memory_of_trainers_engines_and_the_host(dry_run):
    code, out, _ = dry_run("-tmbs 4", available_mib=64 * 1024)
    assert code == 0
    (trainer,) = re.findall(r"memory, trainer +(.*)", out)
    (engine,) = re.findall(r"memory, engine rank +(.*)", out)
    for part in ("parameters", "optimizer", "gradients", "activations"):
        assert part in trainer
    assert "KV cache" in engine
    assert re.search(r"memory, host .*: 1 x trainer, 1 x engine rank; weights in shared memory", out)
    assert out.index("memory, trainer") < out.index("algorithm")  # the plan goes on after the memory


def sizes_of(out):
    """Return the host's memory and that of the trainer's heap in a plan, MiB."""
    (host,), (heap,) = (re.findall(rf"{name} +([\d.]+) (GiB|MiB)", out) for name in ("memory, host", "heap"))
    return tuple(float(number) * {"GiB": 1024, "MiB": 1}[unit] for number, unit in (host, heap))


BUDGET = "-tmbs 32 --max-tokens-per-microbatch 4096 -b fake"


def test_a_budget_that_cannot_fit_is_refused_with_one_that_does(dry_run):
    _, out, _ = dry_run(BUDGET, available_mib=64 * 1024)
    needed, heap = sizes_of(out)
    available = int(0.8 * (needed - heap))
    code, _, error = dry_run(BUDGET, available_mib=available)
    assert code == 2
    assert re.match(r"\S+: --max-tokens-per-microbatch 4096: the run needs .* GiB of this machine's memory, of", error)
    assert "1 x trainer of" in error and "activations" in error and "heap" not in error
    nearest = re.findall(r"nearest: (--max-tokens-per-microbatch \d+), or --gradient-checkpointing", error)
    assert nearest, error
    code, _, error = dry_run(f"{BUDGET} {nearest[0]}", available_mib=available)
    assert (code, error) == (0, "")


@pytest.mark.full
def test_what_the_heap_is_assumed_to_take_is_a_warning_alone(dry_run):
    _, out, _ = dry_run(BUDGET, available_mib=64 * 1024)
    needed, heap = sizes_of(out)
    code, _, error = dry_run(BUDGET, available_mib=int(needed - heap / 2))
    assert code == 0
    assert "warning: --max-tokens-per-microbatch 4096: the run needs" in error and "heap" in error


@pytest.mark.full
def test_states_of_your_own_optimizer_are_unknown_and_not_counted(dry_run, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import torch\n\ndef make(parameters, *, lr):\n    return torch.optim.SGD(parameters, lr=lr)\n")
    code, out, _ = dry_run(f"-tmbs 4 --optimizer {path}:make", available_mib=64 * 1024)
    assert code == 0
    (trainer,) = re.findall(r"memory, trainer +(.*)", out)
    assert "optimizer " not in trainer.partition("(")[0]
    assert trainer.endswith("(the optimizer's states unknown, as --optimizer is your own)")


@pytest.mark.full
def test_what_only_the_longest_samples_would_exceed_is_a_warning(dry_run):
    code, out, error = dry_run("-tmbs 32 -b fake", available_mib=64 * 1024)
    needed = float(re.findall(r"memory, host +([\d.]+) GiB", out)[0]) * 1024
    assert (code, error) == (0, "")
    code, _, error = dry_run("-tmbs 32 -b fake", available_mib=int(0.95 * needed))
    assert code == 0
    assert "warning: -tmbs 32: the run needs" in error and "if a micro-batch has the longest samples" in error


@pytest.mark.full
def test_a_budget_that_cannot_be_lowered_is_a_warning_as_real_samples_may_be_shorter(dry_run):
    flags = "-tmbs 32 --max-tokens-per-microbatch 2048 -mpt 128 -mnt 1920 -b fake"  # 2048 is a longest sample
    _, out, _ = dry_run(flags, available_mib=64 * 1024)
    needed, heap = sizes_of(out)
    available = int((needed - heap) * 0.8)
    code, _, error = dry_run(flags, available_mib=available)
    assert code == 0
    assert "the run needs" in error and "if a micro-batch has the longest samples" in error


class Gpu:
    total_memory = 1024 * MIB


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("flags", "found"), [("", "a trainer needs"), ("--master_address 10.0.0.1", ""), ("-i 2", "")])
def test_gpus_of_a_cluster_and_too_few_ones_are_not_compared(dry_run, monkeypatch, flags, found):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: Gpu)
    gpu = "-tmbs 4 --device cuda --weight-transport gloo --gpu-memory-utilization 0.5 --precision bf16 --max-steps 1"
    code, _, error = dry_run(f"{gpu} {flags}", available_mib=64 * 1024)
    if found:
        assert code == 2 and found in error and "of its GPU, which has 1.0 GiB" in error
    else:
        assert code == 0 and "which has" not in error


def test_where_no_setting_helps_the_refusal_says_so(dry_run):
    code, _, error = dry_run("-tmbs 4", available_mib=16)
    assert code == 2
    assert "--model" in error and "no other settings fit; use a smaller model" in error


def test_a_reference_that_is_computed_first_is_not_there_in_the_steps(large_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("coati_rl.preflight.memory_check.available_bytes", lambda: 64 * 1024 * MIB)
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    (tmp_path / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 64)
    words = ["-m", str(large_model), "-d", str(tmp_path / "pairs.jsonl"), "--device", "cpu", "-tbs", "8", "--dry-run"]
    for flags, is_there in (([], True), (["--precompute-reference"], False)):
        assert train_on_dataset(OFFLINE["dpo"], [*words, *flags], tmp_path) == 0
        assert ("frozen models" in capsys.readouterr().out) == is_there


@pytest.mark.full
def test_a_job_on_a_dataset_has_trainers_alone_and_counts_its_own_samples(
    large_model, rows, tmp_path, capsys, monkeypatch
):
    words = ["-m", str(large_model), "-d", str(rows[1]), "--device", "cpu", "-tbs", "8", "-tmbs", "8", "--dry-run"]
    monkeypatch.setattr("coati_rl.preflight.memory_check.available_bytes", lambda: 64 * 1024 * MIB)
    printed = []
    for flags in ([], ["--max-length", "64"], ["-t", "2", "--plugin", "fsdp2"]):
        assert train_on_dataset(OFFLINE["sft"], [*words, *flags], tmp_path) == 0
        printed.append(capsys.readouterr().out)
    assert all("engine" not in each for each in printed)
    assert "2 x trainer" in printed[2] and "gathered" in printed[2]
    whole, cut = (re.findall(r"activations ([\d.]+) (GiB|MiB)", each)[0] for each in printed[:2])
    assert float(cut[0]) * {"GiB": 1024, "MiB": 1}[cut[1]] < float(whole[0]) * {"GiB": 1024, "MiB": 1}[whole[1]]
