"""Provide runs in threads, and small data for them."""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from coati_rl.config.cli import build_config
from coati_rl.config.rules import check
from coati_rl.preflight.prepare import RunPreparation
from coati_rl.preflight.prompts import RewardFacts
from coati_rl.runtime import cluster
from consumer.parallel.layout_rules import check_layout
from consumer.proofs.model import try_model
from rewards.registry import default_system_prompt, needs_ground_truth


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)  # more of them only wait for each other here


@pytest.fixture(scope="module", autouse=True)
def no_fsync():
    """Leave out the fsyncs, a quarter of a second in each run: no test here ends the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def write_prompts(tmp_path_factory):
    """(name, number) -> a JSONL file of prompts <name>, <name>x, <name>xx, ..., all with the answer 1."""

    def write(name, number):
        path = tmp_path_factory.mktemp("prompts") / f"{name}.jsonl"
        rows = [{"messages": {"role": "user", "content": name + "x" * i}, "gt_answer": "1"} for i in range(number)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture(scope="session")
def parity_file(tmp_path_factory):
    """The file of a reward `score`: 1 for responses of odd length, about half of what the fake engine writes."""
    path = tmp_path_factory.mktemp("reward") / "parity.py"
    path.write_text("def score(response, ground_truth):\n    return float(len(response) % 2)\n")
    return path


@pytest.fixture(scope="session")
def small_run(model_dir, write_prompts):
    """The fields of a run of 8 prompts x 2 samples, 2 prompts a step, a sync every K = 4 / 2 = 2 of the 4 steps."""
    return {
        "model": str(model_dir),
        "dataset": write_prompts("train", 8),
        "backend": "fake",
        "device": "cpu",
        "reward_type": "boxed",
        "system_prompt": "",
        "num_trainers": 1,
        "num_inferencer": 1,
        "num_generations": 2,
        "inference_batch_size": 4,
        "inference_microbatch_size": 2,
        "train_batch_size": 2,
        "train_minibatch_size": 2,
        "train_microbatch_size": 4,
        "max_prompt_tokens": 128,
        "max_new_tokens": 16,
        "learning_rate": 1e-3,
        "save_interval": -1,
    }


@pytest.fixture(scope="session")
def run_in_threads(small_run, tmp_path_factory):
    """(changes to the small run's fields, options of `ThreadedRun`) -> the trace of the whole run.

    It has a reference model only if the changes name an algorithm or something of KL: loading it and scoring with it
    are a sixth of a run.
    """
    from tests.unit.loops.harness import ThreadedRun

    def run(changes=None, **options):
        values = {"run_dir": str(tmp_path_factory.mktemp("runs") / "run"), **small_run, **(changes or {})}
        if not any(name == "algo" or name.startswith(("kl_", "reference_")) for name in values):
            values["kl_coeff"] = 0.0
        return ThreadedRun(values, **options).run()

    return run


@pytest.fixture
def config_with(small_run, tmp_path):
    def make(**changes):
        config = build_config({**small_run, "run_dir": str(tmp_path / "run"), **changes})
        check(config)
        return config

    return make


@pytest.fixture
def prepare_with(config_with):
    """Changes to the small run's fields -> the run, prepared."""
    facts = RewardFacts(default_system_prompt=default_system_prompt, needs_ground_truth=needs_ground_truth)
    return lambda **changes: RunPreparation(
        rewards=facts,
        check_layout=check_layout,
        try_model=try_model,
        is_dry_run=False,
    ).prepare(config_with(**changes))


@pytest.fixture
def ray_calls(monkeypatch):
    """Record the arguments of `ray.init`."""
    calls = []
    monkeypatch.setattr(cluster.ray, "init", lambda **options: calls.append(options))
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster.ray.util, "get_node_ip_address", lambda: "10.0.0.9")
    return calls


@pytest.fixture
def start_ray(ray_calls):
    """A configuration -> Ray, started or joined, and ended."""

    def start(config):
        with (
            tempfile.TemporaryDirectory(prefix="coati-", dir="/tmp") as scratch,
            cluster.ray_cluster(config, num_cpus=2, num_gpus=2, scratch=Path(scratch)),
        ):
            pass

    return start


@pytest.fixture
def start_without_vllm(monkeypatch):
    """Start a producer's actor whose engine is no real one, without the seconds that it takes to import vLLM."""

    def start(actor):
        with monkeypatch.context() as patch:
            for name in ("vllm", "vllm.v1.engine.llm_engine"):
                patch.setitem(sys.modules, name, ModuleType(name))
            actor.start()

    return start


@pytest.fixture
def backend_of(monkeypatch, tmp_path):
    """Return the settings that a trainer builds its backend from."""

    import torch

    import consumer.actor
    from coati_rl.processes.actor_process import ActorContext
    from consumer.parallel.store_location import StoreLocation

    def make(config, backend=None):
        seen = []
        monkeypatch.setattr(consumer.actor, "enter_actor", lambda context: None)
        monkeypatch.setattr("consumer.parallel.process_group.init_process_group", lambda **options: torch.device("cpu"))
        monkeypatch.setattr(
            "consumer.backend.make_backend", lambda settings, **options: seen.append(settings) or backend
        )
        context = ActorContext(name="trainer-0", log_dir=tmp_path, device="cpu", dtype="float32", slot=0, num_slots=1)
        trainer = consumer.actor.TrainerActor(0, config, context, run_dir=tmp_path, checkpoint_dir=tmp_path)
        trainer.start(StoreLocation(address="127.0.0.1"))
        return seen[0]

    return make


@pytest.fixture(scope="session")
def teacher_dir(tokenizer, tmp_path_factory):
    """A Llama of two layers and width 32 that prefers the first 32 tokens; the student is a Qwen3 of one, width 64."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("models") / "teacher"
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight += 1.0  # what all hidden states have in common,
        model.lm_head.weight[:32] += 0.08  # and these tokens' logits read: the student's are nearly equal
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)
