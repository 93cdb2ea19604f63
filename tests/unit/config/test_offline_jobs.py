"""Test the command lines of jobs on a dataset: what they share with rl_example.py, their own flags, refusals."""

import pytest

from coati_rl.command_line import COMMANDS
from coati_rl.config import Config
from coati_rl.config.cli import build_parser, parse, parse_job
from coati_rl.config.commands import OFFLINE, TRAINING, commands_with
from coati_rl.config.fields import described, role_of
from coati_rl.config.gpu_rules import with_device_defaults
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.offline_rules import check_offline
from coati_rl.errors import ConfigError

JOBS = [*OFFLINE]


def config_of(job, *argv):
    return parse_job(argv, OFFLINE[job])[0]


def refusal(job, *argv):
    with pytest.raises(ConfigError) as caught:
        check_offline(config_of(job, *argv))
    return str(caught.value)


def test_every_job_is_a_command():
    assert set(TRAINING) <= set(COMMANDS)
    assert {job: config.COMMAND for job, config in OFFLINE.items()} == {job: f"coati-rl {job}" for job in JOBS}


@pytest.mark.parametrize("job", JOBS)
def test_flags_of_model_layout_precision_outputs_are_those_of_reinforcement_learning(job):
    rl, own = Config.fields(), OFFLINE[job].fields()
    shared = {"model", "precision", "num_trainers", "tensor_parallel_size", "pipeline_parallel_size", "zero_stage"}
    shared |= {
        "plugin",
        "max_tokens_per_microbatch",
        "weight_decay",
        "max_grad_norm",
        "checkpoint_path",
        "wandb",
        "seed",
    }
    assert shared <= own.keys() & rl.keys()
    for name in own.keys() & rl.keys():
        assert described(own[name], "short") == described(rl[name], "short"), name
        assert described(own[name], "spelling") == described(rl[name], "spelling"), name
        assert role_of(own[name]) == role_of(rl[name]), name
    assert not {"num_inferencer", "temperature", "n_behind", "rollout_save_dir", "reward_type"} & own.keys()


@pytest.mark.parametrize("job", JOBS)
def test_every_field_is_a_flag_with_help_and_has_one_section(job):
    config = OFFLINE[job]
    actions = {action.dest: action for action in build_parser(job=config)._actions}
    for name, field in config.fields().items():
        assert field.description and actions[name].help.startswith(field.description.replace("%", "%%")), name
    assert len(config.fields()) == sum(len(section.model_fields) for section in config.sections().values())
    made = config()
    assert config(**made.flat()) == config(**made.flat("json")) == made


def test_each_job_has_its_own_learning_rate_and_name():
    rates = {job: config_of(job).optimizer.learning_rate for job in JOBS}
    assert rates == {"sft": 2e-5, "rm": 1e-5, "prm": 1e-5, "dpo": 1e-6, "kto": 1e-6, "value": 1e-5}
    assert [config_of(job).run.project for job in JOBS] == ["SFT", "RM", "DPO", "KTO", "PRM", "VALUE"]


def test_one_evaluation_set_needs_no_name_and_several_do():
    assert config_of("sft", "-ed", "held.jsonl").data.eval_dataset == {"eval": "held.jsonl"}
    both = config_of("sft", "-ed", "a=x.jsonl", "-ed", "b=y.jsonl")
    assert both.data.eval_dataset == {"a": "x.jsonl", "b": "y.jsonl"}
    with pytest.raises(ConfigError, match="give every path a name, NAME=PATH"):
        config_of("sft", "-ed", "a=x.jsonl", "-ed", "y.jsonl")


def test_a_flag_that_a_command_lacks_is_refused_with_the_commands_that_have_it():
    with pytest.raises(ConfigError, match=r"^-temp: is a flag of coati-rl rl \| generate, and coati-rl sft lacks it$"):
        config_of("sft", "-temp", "1")
    with pytest.raises(ConfigError, match=r"^--max-epochs: is a flag of coati-rl sft \| rm \| .* \| value, and"):
        parse(["--max-epochs", "3"])
    with pytest.raises(ConfigError, match=r"^--beta: is a flag of coati-rl dpo \| kto, and coati-rl rm lacks it$"):
        config_of("rm", "--beta", "0.1")
    with pytest.raises(ConfigError, match=r"^unknown flag --max-epoch; did you mean --max-epochs\?$"):
        config_of("sft", "--max-epoch", "3")
    assert commands_with("--train_batch_size") == [*TRAINING]


def test_rows_are_counted_in_pairs_where_a_row_makes_two_samples():
    config = config_of("dpo", "-t", "4", "-tp", "2", "-tbs", "8")
    assert (config.dp, config.rows_per_step, config.UNIT, config.num_producers, config.num_devices) == (2, 16, 2, 0, 4)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-t", "3", "-tp", "2"], "T % (tp * pp) must be 0: -t 3 is no multiple of 2; use -t 2"),
        (["-t", "1", "-tp", "2"], "T % (tp * pp) must be 0: -t 1 is no multiple of 2; use -t 2"),
        (["-zero", "1", "--precision", "fp32"], "-zero 1 with --precision fp32: "),
        (["--plugin", "fsdp2", "-t", "2", "-pp", "2"], "--plugin fsdp2 with -pp 2: "),
        (["-ei", "5"], "--eval-interval 5: needs --eval-dataset, or -1 to switch it off"),
        (
            ["--max-tokens-per-microbatch", "1000", "--max-length", "600"],
            "--max-tokens-per-microbatch 1000: a single row may have 2 samples of --max-length 600 tokens; use "
            "--max-tokens-per-microbatch 1200 or --max-length 500",
        ),
    ],
)
def test_a_combination_that_cannot_run_is_refused_with_a_remedy(argv, message):
    assert refusal("dpo", *argv).startswith(message)


def test_on_gpus_micro_batches_are_bounded_by_tokens_unless_a_bound_is_given():
    config = with_device_defaults(config_of("dpo", "-tbs", "16", "--max-length", "9000"), "cuda")
    parallel = config.parallel
    assert (parallel.train_microbatch_size, parallel.max_tokens_per_microbatch) == (16, 18000)
    assert parallel.gradient_checkpointing
    for given in (config_of("sft", "-tmbs", "4"), config_of("sft", "--max-tokens-per-microbatch", "4096")):
        assert with_device_defaults(given, "cuda") is given
    assert with_device_defaults(config_of("sft"), "cpu") == config_of("sft")


def test_a_reference_is_held_only_where_the_loss_reads_it():
    assert [config_of("dpo", "--loss", loss).uses_reference for loss in ("dpo", "ipo", "simpo", "orpo")] == [
        True,
        True,
        False,
        False,
    ]
    assert config_of("kto").uses_reference and not config_of("sft").uses_reference
    assert config_of("dpo", "-m", "a").reference_model == "a"
    assert config_of("dpo", "-m", "a", "--reference-model", "b").reference_model == "b"
    assert config_of("dpo", "--precompute-reference").precomputes_reference
    assert not config_of("dpo", "--loss", "simpo", "--precompute-reference").precomputes_reference


def test_what_all_jobs_share_is_the_same_in_each():
    for name, field in OfflineConfig.fields().items():
        for job in JOBS:
            assert role_of(OFFLINE[job].fields()[name]) == role_of(field)
