"""Test that engines of mixtures of experts have transformers' log-probabilities and routes, also after weight syncs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from consumer.backend import Backend
from consumer.parallel.single_process import SingleProcess
from tests.backends import backend_config
from tests.integration.engines.conftest import VOCAB_SIZE, make_tokenizer
from tests.integration.engines.engine_process import hosted_engine
from tests.integration.engines.harness import MAX_MODEL_LEN, TIMEOUT_S, Harness, request

PROMPT = tuple(range(40, 60))
ROUTED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**ROUTED, "norm_topk_prob": True},
    # vLLM's grouped products on a CPU pad experts to a multiple of 32.
    "qwen3_moe, odd": {**ROUTED, "moe_intermediate_size": 40, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "qwen2_moe": {**ROUTED, "shared_expert_intermediate_size": 96},
    "mixtral": {"num_local_experts": 6, "intermediate_size": 64},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 64},
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "head_dim": 16,
    },
}
ENGINES = [
    ("transformers", "qwen3_moe"),
    *(pytest.param(("transformers", model), marks=pytest.mark.full) for model in MODELS if model != "qwen3_moe"),
    # vLLM's attention on a CPU is not that of DeepSeek.
    *(pytest.param(("vllm", model), marks=pytest.mark.full) for model in MODELS if model != "deepseek_v2"),
]

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


def save(directory: Path, model: str, seed: int) -> Path:
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "initializer_range": 0.15,
    }
    config = AutoConfig.for_model(model.partition(",")[0], **{**sizes, **MODELS[model]})
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(params=ENGINES, ids="-".join)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    backend, model = request.param
    checkpoints = [save(tmp_path / str(seed), model, seed) for seed in (0, 1)]
    sizes = {"model": str(checkpoints[0]), "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8}
    with hosted_engine(backend, **sizes, returns_routes=True) as engine:
        harness = Harness(engine, checkpoints)
        yield harness
        harness.sender.close()


@pytest.mark.full
@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_moe, odd"])
def test_transformers_and_vllm_hold_the_trainers_tensors_bit_for_bit(model: str, tmp_path: Path) -> None:
    """Loaded from an exported checkpoint, and vLLM's after weight syncs, too."""
    exported, expected = [tmp_path / f"exported {seed}" for seed in (0, 1)], list[dict[str, bytes]]()
    for seed, directory in enumerate(exported):
        config = backend_config(save(tmp_path / f"base {seed}", model, seed))
        trainer = Backend(config, SingleProcess(device=torch.device("cpu")))
        expected.append({name: tensor.numpy().tobytes() for name, tensor in trainer.export_weights()})
        trainer.save(directory, state={}, has_optimizer=False)
        trainer.close()
    assert expected[0] != expected[1]
    with hosted_engine("vllm", model=str(exported[0]), max_model_len=MAX_MODEL_LEN, max_num_seqs=8) as engine:
        harness = Harness(engine, exported)
        for checkpoint, tensors in enumerate(expected):
            assert {name: tensor.numpy().tobytes() for name, tensor in harness.weights(checkpoint)} == tensors
        for checkpoint in (0, 1, 0):  # loaded, and of two syncs
            if checkpoint != harness.serving:
                harness.sync(checkpoint)
            held = {name: tensor.tobytes() for name, tensor in engine.tensors().items()}
            assert held.keys() == expected[checkpoint].keys()
            assert not [name for name in held if held[name] != expected[checkpoint][name]]
        harness.sender.close()


def test_experts_are_those_of_the_last_sync(harness: Harness) -> None:
    assert harness.probe_gap(PROMPT) < 1e-4
    for checkpoint in (1, 0) * 5:  # ten versions
        harness.sync(checkpoint)
        assert harness.probe_gap(PROMPT) < 1e-4
    for sample in harness.complete(PROMPT, num_samples=4, temperature=0.7, seed=3):
        assert harness.logprob_gap(PROMPT, sample, temperature=0.7) < 1e-4
    check_a_probe_has_the_routes_that_it_was_computed_with(harness)
    check_routes_are_those_of_the_pass_of_each_token(harness)
    check_tokens_keep_their_routes_when_new_weights_compute_them_again(harness)


def routes_of(model: Any, token_ids: Sequence[int]) -> np.ndarray:
    """int64[T, D, K]: transformers' choice for a sequence, sorted; the largest number of the dtype in dense layers."""
    found = np.full((len(token_ids), model.config.num_hidden_layers, 2), np.iinfo(np.uint8).max, dtype=np.int64)
    recorder = model.base_model._can_record_outputs["router_logits"].target_class
    hooks = [
        router.register_forward_hook(
            lambda _, __, outputs, layer=number: found.__setitem__((slice(None), layer), outputs[2])
        )
        for number, layer in enumerate(model.base_model.layers)
        for router in layer.modules()
        if isinstance(router, recorder)
    ]
    with torch.no_grad():
        model(torch.tensor([[*token_ids]]))
    for hook in hooks:
        hook.remove()
    return np.sort(found, axis=-1)


def check_a_probe_has_the_routes_that_it_was_computed_with(harness: Harness) -> None:
    for token_ids in (PROMPT, PROMPT * 2):
        found = harness.engine.probe(token_ids, timeout_s=TIMEOUT_S)
        expected = routes_of(harness.models[harness.serving], token_ids)
        assert (np.sort(found.routes, axis=-1) == expected).all()


def check_routes_are_those_of_the_pass_of_each_token(harness: Harness) -> None:
    # The second turn begins with blocks that an engine may have in its cache; the third prompt shares a block alone.
    turn = harness.complete(PROMPT * 2, num_samples=2, temperature=0.7, seed=5)
    first = [*PROMPT * 2, *turn[0].token_ids.tolist()]
    for prompt in ([*PROMPT * 2], [*first, 50, 51], [*(PROMPT * 2)[:36], 50, 51]):
        for sample in harness.complete(prompt, num_samples=2, temperature=0.7, seed=6):
            whole = [*prompt, *sample.token_ids.tolist()]
            assert len(whole) - 1 <= len(sample.routes) <= len(whole)
            expected = routes_of(harness.models[harness.serving], whole[:-1])
            assert (np.sort(sample.routes[: len(whole) - 1], axis=-1) == expected).all()


def check_tokens_keep_their_routes_when_new_weights_compute_them_again(harness: Harness) -> None:
    prompts = {f"running {i}": [*range(30 + i, 60)] for i in range(4)}
    for name, prompt in prompts.items():
        harness.engine.submit(request(name, prompt, num_samples=4, seed=7, max_new_tokens=100))
    for _ in range(2):
        harness.sync(1 - harness.serving, in_flight=True)
    num_mixed = 0
    for name, prompt in prompts.items():
        for sample in harness.engine.result(name, TIMEOUT_S).completions:
            whole, versions = [*prompt, *sample.token_ids.tolist()], sample.policy_versions.tolist()
            num_mixed += len({*versions}) > 1
            of_version = {v: routes_of(harness.models[harness.checkpoint_of[v]], whole[:-1]) for v in {*versions}}
            # The pass of a token gives the next one's log-probability; the prompt is of the first one's weights.
            passes = [versions[0]] * (len(prompt) - 1) + versions
            expected = np.stack([of_version[version][place] for place, version in enumerate(passes)])
            assert (np.sort(sample.routes[: len(whole) - 1], axis=-1) == expected).all()
    assert num_mixed > 0
