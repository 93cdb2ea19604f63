"""Test that every field of the configuration changes the run; a field without a row fails the last test.

Rows of IN_RUNS: two whole runs in threads that differ in one field differ in what the row looks at.
"""

import inspect
import json

import pytest

from coati_rl.config import Config
from coati_rl.reading.streamed_prompts import StreamedPrompts
from coati_rl.work import HandOverWork
from tests.unit.loops import (
    test_algorithms,
    test_flags_of_adapters,
    test_flags_of_engines,
    test_flags_of_environments,
    test_flags_of_experts,
    test_flags_of_joining_nodes,
    test_flags_of_memory,
    test_flags_of_ray,
    test_flags_of_records,
    test_flags_of_rewards,
    test_flags_of_the_cluster,
    test_flags_of_the_terminal,
    test_logprob_gap,
    test_tasks,
)
from tests.unit.loops.flag_rows import (
    Row,
    directories,
    evaluated,
    first_gradient,
    first_rollout,
    first_words,
    gradient_norm_after_clipping,
    kept_checkpoints,
    metric,
    micro_batch_rows,
    micro_batch_tokens,
    num_events,
    num_micro_batches,
    num_probed_syncs,
    num_steps,
    prompts,
    rates,
    sampled,
    sampling,
    trained,
    weights,
)

DATED = "{{ strftime_now('%d%b') }} {{ messages[-1].content }}"
MOODY = "{{ mood | default('-') }} {{ messages[-1].content }}"
MATH = {"eval_dataset": {"math": "<math>"}, "eval_interval": 2}
WARM = {**MATH, "eval_temperature": 0.5}
SHORT = {"max_prompt_tokens": 20}  # with 16 new tokens a sample has at most 36

ALL_DIRECTORIES = ["checkpoints", "eval", "rollouts"]
KEEP_ALL = {"skip_threshold": None}
HOPELESS = {"kl_coeff": 0.0, "num_generations": 32, "max_steps": 1}, {"score": None}  # as no text is right
UNLIKELY = {"logprob_scale": 8.0}  # the engine's -1 becomes -8, where the trainer says about -6
TIS = {"off_policy_correction": "tis"}
MIDDLING = {"filter_range": (0.4, 0.6), "num_episodes": 2}
PUNISHED = {"soft_over_length_punishment": True}
VESPO, KL_COV = {"algo": "VESPO", "old_logprobs": "trainer"}, {"token_selection": "kl_cov"}
ADAPTIVE_KL, ADAPTIVE_ENTROPY = {"kl_controller": "adaptive"}, {"entropy_target": 50.0, "entropy_coeff": 0.001}
PPO, SAPO = {"algo": "PPO"}, {"algo": "SAPO", "old_logprobs": "engine"}
LORA = {"lora_rank": 2}
TAUGHT = {"teacher": "<model>", "old_logprobs": "trainer"}  # the scripted engine's would be clipped

IN_RUNS = {
    "load_in_4bit": Row(True, first_gradient, base={"lora_rank": 2}),
    # model and data; <name> is a file of prompts, <model> another model, <tmp> the run's parent directory,
    # <checkpoint> the one after step 2 of a run with the base
    "model": Row("<model>", weights),
    "checkpoint_path": Row("<checkpoint>", lambda t: [s["step"] for s in t.steps], [1, 2, 3, 4], [3, 4]),
    "precision": Row("bf16", lambda t: str(t.weights["model.norm.weight"].dtype), "torch.float32", "torch.bfloat16"),
    "lora_rank": Row(2, trained, {"weight"}, {"lora_A", "lora_B"}),
    "lora_alpha": Row(64.0, weights, base=LORA),
    "lora_targets": Row(("q_proj",), lambda t: len(t.gradients[0]), ..., 2 * 1, base=LORA),
    "lora_dropout": Row(0.5, first_gradient, base=LORA),
    "use_rslora": Row(True, weights, base=LORA),
    "adapter": Row("<adapter>", first_gradient, base=LORA),
    "dataset": Row("<other>", lambda t: {g.prompt.text[:5] for g in t.groups}, {"train"}, {"other"}),
    "eval_dataset": Row({"b": "<math>"}, lambda t: {e["task"] for e in t.of("evaluation")}, {"math"}, {"b"}, MATH),
    "max_samples": Row(4, prompts, [*range(10, 18)], [*range(10, 14)]),
    "streaming": Row(True, lambda t: isinstance(t.prepared.train.prompts, StreamedPrompts), False, True),
    "prompt_key": Row("gt_answer", prompts, ..., [6] * 8),  # the column holds one byte
    "input_template": Row("{}", prompts, ..., [*range(5, 13)]),
    "chat_template": Row("chatml", prompts),
    "template_date": Row("2024-07-04T00:00:00", first_words, ..., {"04Jul"}, base={"chat_template": DATED}),
    "chat_template_kwargs": Row({"mood": "calm"}, first_words, {"-"}, {"calm"}, base={"chat_template": MOODY}),
    "num_episodes": Row(2, num_steps, 4, 8),
    "max_steps": Row(1, num_steps, 4, 1),
    "system_prompt": Row("Hm.", prompts, [*range(10, 18)], [*range(16, 24)]),  # s:Hm. and a line break: 6 bytes
    "max_prompt_tokens": Row(13, prompts, [*range(10, 18)], [10, 11, 12, 13]),
    "seed": Row(1, sampled),
    # sampling
    "backend": Row("transformers", sampled),
    "num_generations": Row(4, lambda t: {len(g.scores) for g in t.groups}, {2}, {4}),
    "temperature": Row(0.5, lambda t: (sampling("temperature")(t), first_gradient(t))),
    "top_k": Row(5, lambda t: (sampling("top_k")(t), metric("ratio_max")(t) == 1.0), ({None}, False), ({5}, True)),
    "top_p": Row(0.9, lambda t: (sampling("top_p")(t), metric("ratio_max")(t) == 1.0), ({1.0}, False), ({0.9}, True)),
    "min_p": Row(0.1, lambda t: (sampling("min_p")(t), metric("ratio_max")(t) == 1.0), ({0.0}, False), ({0.1}, True)),
    "max_new_tokens": Row(4, lambda t: max(len(r) for rs in t.responses.values() for r in rs), 16, 4),
    "max_episode_tokens": Row(132, lambda t: max(len(r) for rs in t.responses.values() for r in rs), 16, 4),
    "stop": Row([*"abcdefghijklmnopqrstuvwxyz"], lambda t: sum(step["num_response_tokens"] for step in t.steps)),
    "eval_samples": Row(
        3, lambda t: {len(g.scores) for g in t.groups if g.prompt.purpose == "eval"}, {1}, {3}, WARM
    ),
    "eval_temperature": Row(0.5, evaluated("temperature"), {0.0}, {0.5}, MATH),
    "eval_top_p": Row(0.9, evaluated("top_p"), {1.0}, {0.9}, WARM),
    # algorithm
    "learning_rate": Row(2e-3, metric("learning_rate"), 1e-3, 2e-3),
    "kl_coeff": Row(0.0, lambda t: metric("kl_mean")(t) is None, False, True),
    "reward_type": Row(
        "think_answer_tags", prompts, base={"system_prompt": None, "max_prompt_tokens": 900}, options={"score": None}
    ),
    "reward_normalize": Row(True, first_gradient, base={"advantage_estimator": "group_mean"}),
    "reward_clip": Row((0.25, 0.5), first_gradient, base={"advantage_estimator": "group_mean"}),
    "algo": Row("DR_GRPO", first_gradient),
    "advantage_estimator": Row("leave_one_out", first_gradient),
    "whiten_advantages": Row(True, first_gradient),
    "policy_loss": Row("cispo", first_gradient),
    "sapo_temperature_pos": Row(9.0, first_gradient, base=SAPO),
    "sapo_temperature_neg": Row(9.0, first_gradient, base=SAPO),
    "vespo_positive": Row((9.0, 1.0), weights, base=VESPO),
    "vespo_negative": Row((9.0, 1.0), weights, base=VESPO),
    "token_selection": Row("kl_cov", first_gradient),
    "token_fraction": Row(1.0, first_gradient, base=KL_COV),
    "token_covariance": Row((-9.0, 9.0), first_gradient, base={"token_selection": "clip_cov", "token_fraction": 1.0}),
    "kl_cov_coeff": Row(9.0, first_gradient, base=KL_COV),
    "kl_controller": Row("adaptive", lambda t: t.steps[-1]["kl_coeff"] is None, True, False),
    "kl_target": Row(1e-6, lambda t: t.steps[-1]["kl_coeff"], base=ADAPTIVE_KL),
    "kl_horizon": Row(100.0, lambda t: t.steps[-1]["kl_coeff"], base=ADAPTIVE_KL),
    "entropy_target": Row(50.0, metric("entropy_coeff"), None),
    "entropy_coeff_delta": Row(0.1, lambda t: t.steps[-1]["entropy_coeff"], base=ADAPTIVE_ENTROPY),
    "entropy_coeff_max": Row(0.008, lambda t: t.steps[-1]["entropy_coeff"], base=ADAPTIVE_ENTROPY),
    "reference_update": Row("every=1", lambda t: t.steps[-1]["kl_mean"]),
    "ratio_level": Row("sequence", metric("ratio_max")),
    "loss_variation": Row("token_level", first_gradient),
    "updates_per_batch": Row(2, lambda t: [s.get("update") for s in t.steps], [None] * 4, [0, 0, 1, 1] * 2),
    "clip_eps_low": Row(0.9, metric("clip_fraction")),
    "clip_eps_high": Row(50.0, metric("clip_fraction"), base=KEEP_ALL, options=UNLIKELY),
    "clip_dual": Row(3.0, metric("loss"), base=KEEP_ALL, options=UNLIKELY),
    "entropy_coeff": Row(0.1, first_gradient),
    "kl_place": Row("reward", first_gradient),
    "kl_estimator": Row("k1", first_gradient),
    "kl_clamp": Row(1e-6, lambda t: t.steps[-1]["kl_mean"] <= 1e-6, False, True),
    "kl_bias_correction": Row(True, weights),
    "off_policy_mask_threshold": Row(1e-6, metric("masked_token_fraction"), None),
    "old_logprobs": Row("trainer", lambda t: metric("ratio_max")(t) == 1.0, False, True),
    "off_policy_correction": Row("icepop", lambda t: metric("correction_mean")(t) is None, True, False),
    "off_policy_low": Row(0.5, metric("correction_mean"), base=TIS),
    "off_policy_high": Row(1.5, metric("correction_mean"), base=TIS, options=UNLIKELY),
    "skip_threshold": Row(1.5, metric("samples_skipped"), ..., 4.0, base=KEEP_ALL, options=UNLIKELY),
    "filter_range": Row((0.4, 0.6), lambda t: sum(s["groups_filtered"] for s in t.steps) > 0, False, True),
    "dynamic_batching": Row(True, lambda t: {s["samples_in_loss"] for s in t.steps} == {4}, False, True, MIDDLING),
    "soft_over_length_punishment": Row(True, metric("over_length_penalty_mean"), None),
    "cache_length": Row(8, metric("over_length_penalty_mean"), base=PUNISHED),
    "reward_scale": Row(2.0, metric("over_length_penalty_mean"), base=PUNISHED),
    "filter_truncated_response": Row(True, lambda t: sum(s["samples_in_loss"] for s in t.steps) < 16, False, True),
    "lr_schedule": Row("linear", rates, ..., [pytest.approx(1e-3 * (1 - 0.9 * done / 4)) for done in range(4)]),
    "min_lr_ratio": Row(1.0, rates, ..., [1e-3] * 4),
    "warmup_ratio": Row(0.5, lambda t: rates(t)[:3], ..., [0, 5e-4, 1e-3]),
    "warmup_steps": Row(2, lambda t: rates(t)[:3], ..., [0, 5e-4, 1e-3]),
    "adam_betas": Row((0.5, 0.9), weights),
    "adam_eps": Row(1e-3, weights),
    "weight_decay": Row(0.5, weights),
    "weight_decay_exempt": Row("none", weights),
    "max_grad_norm": Row(1e-4, lambda t: gradient_norm_after_clipping(t) <= 1e-4, False, True),
    # sizes: 8 prompts, P * ibs = 4, tbs = 2, so K = 2
    "num_inferencer": Row(2, num_events("producer_joined"), 1, 2),
    "inference_batch_size": Row(2, num_events("sync"), 3, 5),
    "inference_microbatch_size": Row(1, lambda t: t.engines[0].max_sequences, 2 * 2, 1 * 2),
    "train_batch_size": Row(4, num_steps, 4, 2),
    "train_minibatch_size": Row(1, lambda t: len(num_micro_batches(t)), 4, 8, {"train_microbatch_size": 1}),
    "compute_all_samples": Row(True, lambda t: t.steps[0]["samples_computed"] < 64, True, False, *HOPELESS),
    "train_microbatch_size": Row(1, num_micro_batches, [1] * 4, [2] * 4),  # whole groups
    "max_tokens_per_microbatch": Row(36, lambda t: max(micro_batch_tokens(t)) <= 36, False, True, SHORT),
    "one_sample_per_row": Row(True, micro_batch_rows, [1] * 4, [4] * 4),
    "n_behind": Row(1, lambda t: max(r["staleness_max"] for r in t.steps), 0, 1, options={"hold_trainer": True}),
    "colocate": Row(True, lambda t: any(isinstance(w, HandOverWork) for w in t.work), False, True, {"n_behind": 0}),
    # outputs, intervals, deadlines
    "run_dir": Row("<tmp>/other", directories, ["checkpoints", "rollouts"], ["other"]),
    "save_dir": Row("<tmp>/other", directories, ALL_DIRECTORIES, ["other", "eval", "rollouts"], MATH),
    "eval_save_dir": Row("<tmp>/other", directories, ALL_DIRECTORIES, ["other", "checkpoints", "rollouts"], MATH),
    "rollout_detail": Row("text", lambda t: "token_ids" in first_rollout(t), True, False),
    "rollout_save_dir": Row("<tmp>/other", directories, ALL_DIRECTORIES, ["other", "checkpoints", "eval"], MATH),
    "eval_interval": Row(-1, lambda t: [e["step"] for e in t.of("evaluation")], [0, 2, 4], [], MATH),
    "save_interval": Row(2, lambda t: [e["step"] for e in t.of("checkpoint")], [4], [2, 4]),
    "keep_checkpoints": Row(1, kept_checkpoints, ["step-2", "step-4"], ["step-4"], {"save_interval": 2}),
    "keep_best": Row(
        "eval/math/accuracy", kept_checkpoints, ["step-2", "step-4"], ["best", "best.json", "step-2", "step-4"],
        {**MATH, "save_interval": 2},
    ),
    "teacher": Row("<model>", first_gradient),
    "distill_coeff": Row(0.5, metric("grad_norm"), base=TAUGHT),
    "distill_only": Row(True, first_gradient, base=TAUGHT),
    "distill_kl": Row("full", first_gradient, base=TAUGHT),
    "gamma": Row(0.5, metric("return_mean"), base=PPO),
    "gae_lambda": Row(0.0, metric("return_mean"), base=PPO),
    "critic_lambda": Row(0.0, metric("return_mean"), base=PPO),
    "length_lambda": Row(0.5, first_gradient, base=PPO),
    "critic_model": Row("<model>", metric("value_mean", step=-1), base=PPO),
    "critic_lr": Row(0.1, metric("value_mean", step=-1), base=PPO),
    "critic_warmup": Row(2, lambda t: len(t.gradients), 4, 2, PPO),
    "critic_updates": Row(3, lambda t: t.steps[-1]["value_mean"], base=PPO),
    "value_clip": Row(1e-4, metric("value_clip_fraction", step=-1), base=PPO | {"updates_per_batch": 2}),
    "value_huber": Row(0.01, metric("value_grad_norm"), base=PPO),
    "enable_profiling": Row(True, lambda t: [*map(str, t.paths.run_dir.glob("profile/*.json"))] != [], False, True),
    "inflight_update": Row(True, lambda t: set(t.engines[0].commits_in_flight), {False}, {True}),
    "lora_sync": Row(
        "adapter", lambda t: {any("lora_A" in name for name in names) for names in t.engines[0].names_received},
        {False}, {True}, {"lora_rank": 2},
    ),
    "weight_transport": Row("gloo", lambda t: set(t.engines[0].wires), {"shm"}, {"gloo"}),
    "sync_deltas": Row(True, lambda t: set(t.engines[0].deltas), {False}, {True}, {"weight_transport": "file"}),
    "probe_interval": Row(2, num_probed_syncs, 3, 2),
    "sync_timeout_s": Row(7.0, lambda t: set(t.engines[0].staging_timeouts), {60.0}, {7.0}),
}  # fmt: skip

ELSEWHERE = {  # fields that act on Ray and on processes, or end a run, each in a test of its own
    name.removeprefix("test_").split("__")[0]: function
    for module in (
        test_flags_of_adapters,
        test_flags_of_the_cluster,
        test_flags_of_the_terminal,
        test_flags_of_ray,
        test_flags_of_records,
        test_flags_of_rewards,
        test_flags_of_engines,
        test_flags_of_environments,
        test_flags_of_experts,
        test_flags_of_joining_nodes,
        test_flags_of_memory,
        test_algorithms,
        test_logprob_gap,
        test_tasks,
    )
    for name, function in vars(module).items()
    if name.startswith("test_") and "__" in name and inspect.isfunction(function)
}


@pytest.fixture(scope="module")
def run_once(run_in_threads, make_model_dir, write_prompts, tmp_path_factory):
    """Like `run_in_threads`, but a run that was made before is not made again."""
    traces = {}

    def fill(value, tmp):
        if isinstance(value, dict):
            return {key: fill(inner, tmp) for key, inner in value.items()}
        if value == "<model>":
            return str(make_model_dir(1))
        if value == "<adapter>":
            return str(run({**LORA, "save_interval": 2}, {}).paths.checkpoints / "step-2")
        if value == "<checkpoint>":
            return str(run({"save_interval": 2}, {}).paths.checkpoints / "step-2")
        if isinstance(value, str) and value.startswith("<tmp>"):
            return value.replace("<tmp>", str(tmp))
        return write_prompts(value.strip("<>"), 8) if isinstance(value, str) and value.startswith("<") else value

    def run(changes, options):
        key = json.dumps([changes, options], sort_keys=True)
        if key not in traces:
            tmp = tmp_path_factory.mktemp("runs")
            traces[key] = run_in_threads({"run_dir": f"{tmp}/run", "algo": "GRPO", **fill(changes, tmp)}, **options)
        return traces[key]

    return run


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", IN_RUNS)
def test_changing_a_field_changes_the_run(run_once, name):
    row = IN_RUNS[name]
    base = row.base | ({"max_steps": 1} if hasattr(row.see, "needs_one_step") else {})
    before, after = (row.see(run_once(base | change, row.options)) for change in ({}, {name: row.value}))
    assert before != after
    assert (before if row.was is ... else row.was) == before
    assert (after if row.now is ... else row.now) == after


def test_every_field_has_a_row():
    assert sorted([*IN_RUNS, *ELSEWHERE]) == sorted(Config.fields())
