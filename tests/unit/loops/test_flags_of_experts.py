"""Test that fields for mixtures of experts reach the trainers (see test_flags.py)."""

import shutil

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from coati_rl.checkpoint.position import read_data_state
from coati_rl.errors import ConfigError
from coati_rl.work import SaveWork
from consumer.models.route_replay import expert_weights
from consumer.proofs.model import try_model
from producer.engines import transformers_engine
from producer.engines.transformers_routes import RouteRecorder
from tests.unit.loops.recorded_run import replay_of, write_metrics
from tests.unit.loops.test_resume_ahead import K1, OPTIONS, records_after, samples_after

METRICS = {"router_load_max", "router_idle_experts", "router_entropy_mean", "aux_loss"}


@pytest.fixture(scope="module")
def expert_dir(make_model_dir, tokenizer, tmp_path_factory):
    """A Qwen3-MoE of one layer and four experts, with the tokenizer of the dense model."""
    directory = tmp_path_factory.mktemp("experts") / "model"
    shutil.copytree(make_model_dir(), directory, ignore=lambda *_: {"model.safetensors", "config.json"})
    config = Qwen3MoeConfig(
        vocab_size=272,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return str(directory)


def test_aux_loss_coeff__adds_the_gradient_of_balance_to_a_mixture_of_experts(run_in_threads, expert_dir):
    without, balanced = (
        run_in_threads({"model": expert_dir, "aux_loss_coeff": coeff, "max_steps": 1, "kl_coeff": 0.01})
        for coeff in (0.0, 1.0)
    )
    router = "model.layers.0.mlp.gate.weight"
    change = (balanced.gradients[0][router] - without.gradients[0][router]).norm()
    assert change > 0.1 * without.gradients[0][router].norm()
    assert {name: without.steps[0][name] for name in METRICS} == {name: balanced.steps[0][name] for name in METRICS}
    assert balanced.steps[0]["aux_loss"] >= 0.9
    assert balanced.steps[0]["router_load_max"] >= 1.0


def test_aux_loss_coeff__of_a_dense_model_is_refused(config_with, make_model_dir):
    config = config_with(aux_loss_coeff=0.1)
    with pytest.raises(
        ConfigError, match=r"^--aux-loss-coeff 0\.1: --model .* is a qwen3; its loss is that of the rou"
    ):
        try_model(config, make_model_dir(), flag="--model")


@pytest.fixture(scope="module")
def with_routes(run_in_threads, expert_dir, parity_file):
    """How routes are used -> the directory of a run of two steps with transformers' engine, recorded for a replay."""

    def make(mode, **changes):
        own = {"model": expert_dir, "backend": "transformers", "router_replay": mode, "max_steps": 2, **changes}
        own |= {
            "reward_type": f"{parity_file}:score",
            "num_generations": 4,
            "save_interval": 1,
            "inference_batch_size": 2,
        }
        return write_metrics(run_in_threads(own, score=None))

    return make


@pytest.mark.full
def test_router_replay__has_trainers_compute_with_the_experts_that_the_engine_chose(with_routes):
    run = replay_of(with_routes("rollout"))
    for record in run.records.values():
        assert record["route_missing"] == 0  # of prompts and responses, up to the token that predicts the last
        assert record["route_mismatch"] < 0.05  # of two programs in float32
    line = next(run.run.rollouts(1)).line
    assert line["routes"]["shape"] == [len(line["prompt_token_ids"]) + len(line["token_ids"]), 1, 2]
    assert {stage.verdict for stage in run.stages(2)} == {"agrees"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("measure", {}),
        ("rollout", {}),
        ("rollout", {"colocate": True, "n_behind": 0}),
        ("rollout", {"n_behind": 1, "inflight_update": True, "num_inferencer": 2}),
    ],
)
def test_router_replay__scores_probes_with_the_experts_of_an_engine_that_chooses_others(
    run_in_threads, expert_dir, monkeypatch, mode, changes
):
    class OtherExperts(RouteRecorder):
        """An engine whose routers choose the next expert in place of each of their own."""

        def __init__(self, model):
            router = model.base_model.layers[0].mlp.gate
            router.register_forward_hook(lambda router, _, outputs: others(router, *outputs))
            super().__init__(model)

    def others(router, logits, weights, selected):
        chosen = (selected + 1) % 4
        return logits, expert_weights(router, logits, chosen).to(weights.dtype), chosen

    monkeypatch.setattr(transformers_engine, "RouteRecorder", OtherExperts)
    own = {"model": expert_dir, "backend": "transformers", "router_replay": mode, "max_steps": 3, **changes}
    trace = run_in_threads({**own, "max_logprob_gap": 100.0})
    gaps = [event["probe_gap_max"] for event in trace.of("sync")]
    assert len(gaps) >= 2 and all((gap <= 1e-4) is (mode == "rollout") for gap in gaps)


@pytest.mark.full
def test_router_replay__measures_the_choices_without_changing_the_run(with_routes):
    runs = {mode: replay_of(with_routes(mode)) for mode in ("none", "measure")}
    assert not {"route_missing", "route_mismatch"} & runs["none"].records[1].keys()
    assert runs["measure"].records[1]["route_missing"] == 0
    assert {run.records[2]["grad_norm"] for run in runs.values()} == {runs["none"].records[2]["grad_norm"]}


@pytest.mark.full
def test_a_run_whose_checkpoints_hold_routes_resumes_bit_for_bit(run_in_threads, expert_dir, write_prompts):
    fields = {"model": expert_dir, "backend": "transformers", "router_replay": "rollout", "learning_rate": 1e-2}
    fields |= {**K1, "n_behind": 1, "save_interval": 1, "dataset": write_prompts("train", 16), "max_logprob_gap": 100.0}
    whole = run_in_threads(fields, **OPTIONS)
    assert max(record["route_mismatch"] for record in whole.steps) > 0.01  # of older weights: a lost route would show
    saves = [work for work in whole.work if isinstance(work, SaveWork)]
    kept = [save.step for save in saves if read_data_state(save.data_state)[0].kept]
    for step in (kept[0], kept[-1]):
        checkpoint = whole.paths.checkpoints / f"step-{step}"
        resumed = run_in_threads({**fields, "checkpoint_path": str(checkpoint)}, **OPTIONS)
        assert samples_after(resumed, step) == samples_after(whole, step)
        assert records_after(resumed, step) == records_after(whole, step)
        assert {name for name, each in whole.weights.items() if not torch.equal(resumed.weights[name], each)} == set()


def test_router_replay__of_a_dense_model_or_an_engine_without_routes_is_refused(config_with, make_model_dir):
    config = config_with(router_replay="rollout", backend="transformers")
    with pytest.raises(
        ConfigError, match=r"^--router-replay rollout: --model .* is a qwen3; routes are those of deepse"
    ):
        try_model(config, make_model_dir(), flag="--model")
    for backend in ("fake", "http://127.0.0.1:9"):
        with pytest.raises(ConfigError, match=rf"--router-replay measure with -b {backend}: it returns no routes"):
            config_with(router_replay="measure", backend=backend)
