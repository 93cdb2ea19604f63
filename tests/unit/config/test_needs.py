"""Test that a setting without effect is refused with what it needs, and accepted with that."""

from typing import Any

import pytest

from coati_rl.config.cli import build_job
from coati_rl.config.commands import ALL
from coati_rl.config.config import Config
from coati_rl.config.fields import needs_of
from coati_rl.config.needs import need_problems, needed
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError

# A value of each setting that needs another one, as Python has it and as its flag is written.
SETTINGS = {
    "block_size": (32, "--block-size 32"),
    "quantization": ("fp8", "--quantization fp8"),
    "enforce_eager": (False, "--no-enforce-eager"),
    "engine_arg": (["a=1", "b=2"], "--engine-arg a=1 b=2"),
    "producer_tensor_parallel_size": (2, "--producer-tensor-parallel-size 2"),
    "eval_samples": (4, "--eval-samples 4"),
    "eval_top_p": (0.5, "--eval-top-p 0.5"),
    "env_arg": (["a=1"], "--env-arg a=1"),
    "env_isolation": ("process", "--env-isolation process"),
    "max_turns": (3, "--max-turns 3"),
    "env_timeout": (5.0, "--env-timeout 5.0"),
    "agent_timeout": (5.0, "--agent-timeout 5.0"),
    "agent_processes": (2, "--agent-processes 2"),
    "agent_ground_truth": (True, "--agent-ground-truth"),
    "tool_format": ("hermes", "--tool-format hermes"),
    "stale_episodes": ("cut", "--stale-episodes cut"),
    "clip_dual": (3.0, "--clip-dual 3.0"),
    "sapo_temperature_pos": (2.0, "--sapo-temperature-pos 2.0"),
    "sapo_temperature_neg": (2.0, "--sapo-temperature-neg 2.0"),
    "vespo_positive": ((1.0, 2.0), "--vespo-positive 1.0,2.0"),
    "vespo_negative": ((1.0, 2.0), "--vespo-negative 1.0,2.0"),
    "token_fraction": (0.5, "--token-fraction 0.5"),
    "token_covariance": ((0.0, 2.0), "--token-covariance 0.0,2.0"),
    "kl_cov_coeff": (2.0, "--kl-cov-coeff 2.0"),
    "kl_clamp": (10.0, "--kl-clamp 10.0"),
    "kl_bias_correction": (True, "--kl-bias-correction"),
    "off_policy_low": (0.5, "--off-policy-low 0.5"),
    "off_policy_high": (3.0, "--off-policy-high 3.0"),
    "cache_length": (100, "--cache-length 100"),
    "kl_controller": ("adaptive", "--kl-controller adaptive"),
    "kl_target": (0.2, "--kl-target 0.2"),
    "kl_horizon": (5.0, "--kl-horizon 5.0"),
    "entropy_coeff_delta": (0.1, "--entropy-coeff-delta 0.1"),
    "entropy_coeff_max": (2.0, "--entropy-coeff-max 2.0"),
    "reference_update": ("every=5", "--reference-update every=5"),
    "gamma": (0.5, "--gamma 0.5"),
    "gae_lambda": (0.5, "--gae-lambda 0.5"),
    "critic_lambda": (0.5, "--critic-lambda 0.5"),
    "length_lambda": (0.5, "--length-lambda 0.5"),
    "critic_model": ("/critic", "--critic-model /critic"),
    "critic_lr": (0.5, "--critic-lr 0.5"),
    "critic_updates": (2, "--critic-updates 2"),
    "critic_warmup": (2, "--critic-warmup 2"),
    "value_clip": (0.5, "--value-clip 0.5"),
    "value_huber": (0.5, "--value-huber 0.5"),
    "distill_coeff": (0.5, "--distill-coeff 0.5"),
    "distill_only": (True, "--distill-only"),
    "distill_kl": ("full", "--distill-kl full"),
    "distill_weight": (0.5, "--distill-weight 0.5"),
    "lora_alpha": (8.0, "--lora-alpha 8.0"),
    "lora_targets": (("q_proj", "v_proj"), "--lora-targets q_proj,v_proj"),
    "lora_dropout": (0.5, "--lora-dropout 0.5"),
    "use_rslora": (True, "--use-rslora"),
    "lora_sync": ("adapter", "--lora-sync adapter"),
    "export": ("merged", "--export merged"),
    "load_in_4bit": (True, "--load-in-4bit"),
    "min_lr_ratio": (0.5, "--min-lr-ratio 0.5"),
    "weight_decay": (0.5, "--weight-decay 0.5"),
    "weight_decay_exempt": ("none", "--weight-decay-exempt none"),
    "adam_betas": ((0.5, 0.5), "--adam-betas 0.5,0.5"),
    "adam_eps": (0.5, "--adam-eps 0.5"),
    "sync_deltas": (True, "--sync-deltas"),
    "max_producers": (4, "--max-producers 4"),
    "join_host": ("10.0.0.5", "--join-host 10.0.0.5"),
    "join_cert": ("/cert.pem", "--join-cert /cert.pem"),
    "join_key": ("/key.pem", "--join-key /key.pem"),
    "best_of": (True, "--best-of"),
    "pairs": (True, "--pairs"),
    "min_reward": (1.0, "--min-reward 1.0"),
    "reward_template": ("{input}{reward}", "--reward-template {input}{reward}"),
}
# Of what is needed: a value that does not do, where the default does, and one that does, where none is named.
OFF = {
    **{"backend": "fake", "policy_loss": "cispo", "kl_coeff": 0.0, "kl_place": "reward"},
    **{"lr_schedule": "constant", "optimizer": "/mine.py:make"},
}
ON = {
    **{"master_address": "10.0.0.5:6379", "join_port": 8443, "join_cert": "/cert.pem"},
    **{"kl_coeff": 0.1, "entropy_target": 0.5, "off_policy_correction": "tis", "soft_over_length_punishment": True},
    **{"env": "/w.py:W", "tools": ["calculator"], "mcp_server": ["serve"], "agent_command": "agent"},
    **{"eval_temperature": 1.0, "teacher": "/teacher", "lora_rank": 4, "adapter": "/adapter", "reward_type": "boxed"},
}
JOBS = {name: job for job in (*ALL.values(), Config) for name in job.fields() if needed(job, name)}


def problems(job: Any, **values: Any) -> list[str]:
    return [*need_problems(build_job({"model": "m", **({"dataset": "d"} if job is not Config else {}), **values}, job))]


@pytest.mark.parametrize("name", JOBS)
def test_a_setting_without_effect_is_refused_with_what_it_needs_and_accepted_with_any_of_that(name: str) -> None:
    job, (value, flag) = JOBS[name], SETTINGS[name]
    needs = needs_of(job.sections()[job.section_of()[name]], name)
    off = {other: OFF[other] for other in needs if other in OFF}
    (problem,) = problems(job, **{name: value}, **off)
    assert problem == f"{flag} without {needed(job, name)}: has no effect; add that, or leave it out"
    for other, wanted in needs.items():
        for each in wanted or (ON[other],):
            assert not any(flag in problem for problem in problems(job, **{name: value, **off, other: each}))


def test_what_lacks_the_same_is_named_in_one_message_and_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check(Config(kl_target=0.2, kl_horizon=500, kl_cov_coeff=2, kl_coeff=0, kl_place="loss"))
    told = str(caught.value).splitlines()
    assert "--kl-target 0.2 and --kl-horizon 500.0 without --kl-controller adaptive: has no effect" in str(told)
    assert "--kl-cov-coeff 2.0 without --token-selection kl_cov" in str(told) and len(told) == 3
