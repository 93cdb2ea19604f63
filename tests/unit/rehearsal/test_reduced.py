"""Test the configuration that is rehearsed: small, of the user's arithmetic, in a directory of its own, on the CPU."""

import pytest

from coati_rl.config import Config
from coati_rl.config.cli import build_job, parse
from coati_rl.config.jobs.dpo import DpoJobConfig
from coati_rl.config.offline_rules import check_offline
from coati_rl.config.rules import check
from coati_rl.preflight.memory_check import passes
from coati_rl.rehearsal.reduced import MAX_RANKS, reduced, with_models

MODEL, SMALL = "/models/large", "/scratch/model-0"


def rehearsed(text, **changes):
    """The rehearsal of a command."""
    config = parse(["-m", MODEL, "-d", "train.jsonl", *text.split()])[0]
    options = {"precision": "bf16", "run_dir": "/scratch/run", "models": {MODEL: SMALL}, "evaluation": None}
    return reduced(config, **{**options, "max_rows": None, "is_valid": passes(check), **changes})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("trainers", "tp", "pp", "producers", "ibs", "tbs", "tmbs", "imbs"),
    [
        (1, 1, 1, 1, 48, 48, 48, 48),
        (1, 1, 1, 3, 48, 4, 4, 8),
        (2, 1, 1, 2, 32, 32, 8, 8),
        (2, 2, 1, 3, 32, 96, 32, 4),
        (4, 2, 2, 8, 12, 48, 12, 6),
        (6, 1, 1, 3, 16, 8, 2, 16),
        (6, 1, 2, 1, 48, 16, 16, 8),
        (16, 4, 2, 8, 48, 96, 8, 48),
        (16, 4, 1, 1, 48, 4, 2, 8),
        (16, 1, 1, 2, 64, 8, 4, 8),
    ],
)
def test_batches_become_small_and_keep_their_relations(trainers, tp, pp, producers, ibs, tbs, tmbs, imbs):
    asked = f"-t {trainers} -tp {tp} -pp {pp} -i {producers} -ibs {ibs} -imbs {imbs} -tbs {tbs} -tMbs {tmbs} -tmbs 1"
    before = parse(asked.split())[0]
    found = rehearsed(asked)
    config, parallel = found.config, found.config.parallel
    check(config)
    assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size) in ((tp, pp), (2, 2))
    assert parallel.num_trainers <= MAX_RANKS and parallel.num_inferencer <= 2
    assert (config.dp > 1) == (before.dp > 1 and tp * pp < MAX_RANKS)
    assert (config.sync_period > 1) == (before.sync_period > 1)
    has_several = tbs > tmbs
    assert (parallel.train_batch_size > parallel.train_minibatch_size) == has_several
    assert config.prompts_per_step <= 8 and config.prompts_per_rollout <= 16
    assert found.num_steps == 2 * found.first_save == 2 * config.sync_period


def test_context_parallel_ranks_are_halved_like_others():
    found = rehearsed("-t 16 -tp 2 --context-parallel 4 -i 2 -ibs 32 -tbs 32 -tMbs 32")
    parallel = found.config.parallel
    assert (parallel.tensor_parallel_size, parallel.context_parallel_size, parallel.num_trainers) == (2, 2, 4)
    assert (
        "--context-parallel 4 is rehearsed as --context-parallel 2; the real sizes were checked with it" in found.notes
    )


def test_trainers_that_share_a_copy_of_the_weights_are_no_more_than_there_are():
    found = rehearsed("-t 16 -tp 2 --plugin fsdp2 --fsdp-size 4 -i 2 -ibs 32 -tbs 32 -tMbs 32")
    parallel = found.config.parallel
    assert (parallel.tensor_parallel_size, parallel.fsdp_size, parallel.num_trainers) == (2, 2, 4)
    assert "--fsdp-size 4 is rehearsed as --fsdp-size 2; the real sizes were checked with it" in found.notes


def test_a_layout_of_more_ranks_than_a_cpu_starts_in_time_is_said():
    found = rehearsed("-t 32 -tp 8 -pp 2 -i 4 -ptp 8 -ibs 32 -tbs 32 -tMbs 32")
    parallel = found.config.parallel
    assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.num_trainers) == (2, 2, 4)
    assert (parallel.num_inferencer, parallel.producer_tensor_parallel_size) == (1, 2)
    assert found.notes == (
        "-tp 8 is rehearsed as -tp 2; the real sizes were checked with it",
        "-ptp 8 is rehearsed as -ptp 2; the real sizes were checked with it",
    )


def test_engines_that_have_the_trainers_devices_are_not_more_than_these():
    found = rehearsed("--colocate -t 8 -i 8 -ibs 32 -tbs 32 -tMbs 32")
    assert (found.config.parallel.num_trainers, found.config.parallel.num_inferencer) == (2, 2)
    found = rehearsed("--colocate -t 1 -i 1 -ibs 32 -tbs 32 -tMbs 32")
    assert (found.config.parallel.num_trainers, found.config.parallel.num_inferencer) == (1, 1)


def test_nothing_of_the_users_directories_machines_and_accounts_is_used():
    asked = (
        "--run-dir /data/run -sd /data/saved -esd /data/eval -rsd /data/rollouts -cp /data/old --ray_dir /data/ray "
        "--master_address head --master_port 9999 --wandb --device cuda --keep-checkpoints 1 -si 500"
    )
    values = rehearsed(asked).config.flat()
    assert not [value for value in values.values() if "/data" in str(value)]
    assert (values["run_dir"], values["device"], values["master_address"]) == ("/scratch/run", "cpu", None)
    assert (values["master_port"], values["wandb"], values["save_interval"]) == (0, False, 1)


def test_each_model_is_replaced_by_the_small_one_of_its_directory():
    models = {MODEL: SMALL, "/models/judge": "/scratch/model-1", "/models/critic": "/scratch/model-2"}
    config = Config(model=MODEL, dataset="d", algo="PPO", critic_model="/models/critic", teacher=MODEL)
    config = config.with_changes(reward_type="model:/models/judge=2,boxed=1")
    found = reduced(
        config,
        precision="fp32",
        run_dir="r",
        models=models,
        evaluation=None,
        max_rows=None,
        is_valid=lambda _: True,
    ).config
    assert (found.model.model, found.critic.critic_model, found.distillation.teacher) == (
        SMALL,
        "/scratch/model-2",
        SMALL,
    )
    assert found.reward.reward_type == "model:/scratch/model-1=2,boxed=1"
    assert with_models("boxed", models) == "boxed"


def test_random_weights_answer_no_prompt_and_seldom_end_so_samples_are_not_filtered():
    asked = "--algo DAPO"
    assert parse(asked.split())[0].algorithm.dynamic_batching
    algorithm = rehearsed(asked).config.algorithm
    assert (algorithm.filter_range, algorithm.dynamic_batching) == (None, False)
    assert not algorithm.filter_truncated_response
    assert algorithm.clip_eps_high == 0.28, "all else of the preset stays"


def test_one_sample_that_fails_by_chance_does_not_end_a_step_of_few():
    assert rehearsed("").config.run.max_failure_rate == 0.5  # 2 of 4 samples
    assert rehearsed("--max-failure-rate 0.9").config.run.max_failure_rate == 0.9


def test_what_only_gpus_show_is_left_out_and_said():
    found = rehearsed("--quantization fp8 --engine-arg kv_cache_dtype=fp8 --weight-transport nccl")
    values = found.config.flat()
    assert (values["quantization"], values["engine_arg"], values["weight_transport"]) == (None, [], "auto")
    assert [note.split()[0] for note in found.notes] == ["--quantization", "--engine-arg", "--weight-transport"]


def test_a_size_that_a_rule_asks_for_stays():
    # pass@k needs k samples: a rule that refuses fewer keeps the user's number.
    found = rehearsed("-g 16", is_valid=lambda config: config.sampling.num_generations == 16)
    assert found.config.sampling.num_generations == 16


def test_more_prompts_are_taken_where_a_rule_asks_for_them():
    asked = "-t 2 -i 2 -ibs 32 -imbs 8 -tbs 32 -tMbs 32"
    found = rehearsed(asked, is_valid=lambda config: config.parallel.train_minibatch_size >= 2)
    assert (found.config.parallel.train_batch_size, found.config.parallel.inference_batch_size) == (2, 2)


def test_a_file_of_a_few_rows_fills_all_steps():
    assert rehearsed("-e 1").config.data.num_episodes == 16


def test_evaluation_is_at_each_step_or_off_as_asked():
    found = rehearsed("-ei 50 -ed a=x.jsonl", evaluation={"a": "/scratch/eval-0.jsonl"}).config
    assert (found.data.eval_dataset, found.run.eval_interval) == ({"a": "/scratch/eval-0.jsonl"}, 1)
    assert rehearsed("").config.run.eval_interval == -1


def test_a_job_on_a_dataset_takes_two_steps_of_two_rows():
    values = {"model": MODEL, "dataset": "pairs.jsonl", "num_trainers": 8, "tensor_parallel_size": 2}
    config = build_job({**values, "train_batch_size": 64, "train_microbatch_size": 16}, DpoJobConfig)
    found = reduced(
        config,
        precision="bf16",
        run_dir="/scratch/run",
        models={MODEL: SMALL},
        evaluation=None,
        max_rows=100,
        is_valid=passes(check_offline),
    )
    parallel = found.config.parallel
    assert (parallel.num_trainers, parallel.tensor_parallel_size, parallel.train_batch_size) == (4, 2, 2)
    assert (found.num_steps, found.first_save, found.config.data.max_samples) == (2, 1, 100)
