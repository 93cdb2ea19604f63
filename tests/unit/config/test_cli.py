"""Test the command line: ColossalChat's 40 flags, our own flags, --config, and error messages."""

import pytest

from coati_rl.config import Config
from coati_rl.config.cli import build_parser, parse
from coati_rl.errors import ConfigError

# The reference's table: short form, long form, field, default, another value as text, the same as the field holds it.
REFERENCE_FLAGS = [
    ("-m", "--model", "model", "Qwen/Qwen2.5-7B", "a/b", "a/b"),
    ("-cp", "--checkpoint-path", "checkpoint_path", None, "c", "c"),
    ("-d", "--dataset", "dataset", "data.jsonl", "d.csv", "d.csv"),
    ("-ed", "--eval-dataset", "eval_dataset", None, '{"t": "e.jsonl"}', {"t": "e.jsonl"}),
    ("-p", "--project", "project", "GRPO", "name", "name"),
    ("-e", "--num-episodes", "num_episodes", 1, "3", 3),
    ("-t", "--num-trainers", "num_trainers", 2, "4", 4),
    ("-i", "--num-inferencer", "num_inferencer", 2, "4", 4),
    ("-g", "--num-generations", "num_generations", 8, "16", 16),
    ("-ibs", "--inference-batch-size", "inference_batch_size", 64, "32", 32),
    ("-imbs", "--inference-microbatch-size", "inference_microbatch_size", 8, "4", 4),
    ("-tbs", "--train-batch-size", "train_batch_size", 32, "16", 16),
    ("-tMbs", "--train-minibatch-size", "train_minibatch_size", 8, "4", 4),
    ("-tmbs", "--train-microbatch-size", "train_microbatch_size", 2, "1", 1),
    ("-tp", "--tensor-parallel-size", "tensor_parallel_size", 1, "2", 2),
    ("-pp", "--pipeline-parallel-size", "pipeline_parallel_size", 1, "2", 2),
    ("-zero", "--zero-stage", "zero_stage", 0, "1", 1),
    (None, "--ray_dir", "ray_dir", None, "r", "r"),
    (None, "--master_address", "master_address", None, "10.0.0.1", "10.0.0.1"),
    (None, "--master_port", "master_port", 0, "29507", 29507),
    ("-b", "--backend", "backend", "vllm", "transformers", "transformers"),
    ("-temp", "--temperature", "temperature", 1.0, "0.7", 0.7),
    ("-topk", "--top-k", "top_k", None, "50", 50),
    ("-topp", "--top-p", "top_p", 1.0, "0.9", 0.9),
    ("-s", "--system-prompt", "system_prompt", None, "Be brief.", "Be brief."),
    ("-mnt", "--max-new-tokens", "max_new_tokens", 3584, "64", 64),
    ("-mpt", "--max-prompt-tokens", "max_prompt_tokens", 512, "64", 64),
    ("-ptp", "--producer-tensor-parallel-size", "producer_tensor_parallel_size", 1, "2", 2),
    ("-a", "--algo", "algo", "GRPO", "DAPO", "DAPO"),
    ("-lr", "--learning-rate", "learning_rate", 1e-6, "1e-4", 1e-4),
    ("-kl", "--kl-coeff", "kl_coeff", 0.01, "0", 0.0),
    ("-rt", "--reward-type", "reward_type", "think_answer_tags", "boxed", "boxed"),
    ("-cv", "--code-verifier-api-url", "code_verifier_api_url", None, "http://u", "http://u"),
    ("-ei", "--eval-interval", "eval_interval", -1, "10", 10),
    ("-nb", "--n-behind", "n_behind", 0, "1", 1),
    ("-si", "--save-interval", "save_interval", 100, "-1", -1),
    ("-sd", "--save-dir", "save_dir", None, "s", "s"),
    ("-esd", "--eval-save-dir", "eval_save_dir", None, "e", "e"),
    ("-rsd", "--rollout-save-dir", "rollout_save_dir", None, "r", "r"),
]  # and --enable_profiling, which takes no value


def config_of(*argv):
    return parse(argv)[0]


def refusal(*argv):
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    return str(caught.value)


def test_the_reference_has_forty_flags():
    assert len(REFERENCE_FLAGS) + 1 == 40


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("short", "long", "field", "default", "text", "value"), REFERENCE_FLAGS)
def test_a_flag_of_the_reference_has_its_short_form_long_form_and_default(short, long, field, default, text, value):
    assert config_of().flat()[field] == default
    for spelling in filter(None, (short, long)):
        assert config_of(spelling, text).flat()[field] == value


def test_profiling_is_off_unless_asked_for():
    assert config_of().run.enable_profiling is False
    assert config_of("--enable_profiling").run.enable_profiling is True


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("long", "field", "text"), [(r[1], r[2], r[4]) for r in REFERENCE_FLAGS])
def test_hyphens_and_underscores_are_the_same_in_every_long_flag(long, field, text):
    hyphens, underscores = "--" + long[2:].replace("_", "-"), "--" + long[2:].replace("-", "_")
    assert config_of(hyphens, text) == config_of(underscores, text) != config_of()
    assert config_of(f"{hyphens}={text}").flat()[field] == config_of(long, text).flat()[field]


def test_every_field_of_the_config_is_a_flag_with_help():
    actions = {action.dest: action for action in build_parser()._actions}
    for name, field in Config.fields().items():
        assert field.description and actions[name].help.startswith(field.description.replace("%", "%%")), name


def test_short_flags_take_their_number_with_or_without_a_space():
    assert (
        config_of("-t4").parallel.num_trainers
        == config_of("-t", "4").parallel.num_trainers
        == config_of("-t=4").parallel.num_trainers
        == 4
    )
    assert config_of("-tbs8").parallel.train_batch_size == 8


def test_a_dry_run_is_told_apart():
    assert parse([])[1] is False
    assert parse(["--dry-run"])[1] is True


def test_a_value_may_begin_with_a_dash_where_a_digit_follows():
    reward = config_of("--reward-clip", "-10,10", "--correct-from", "-1e-3").reward
    assert (reward.reward_clip, reward.correct_from) == ((-10.0, 10.0), -1e-3)


def test_stop_strings_are_given_one_by_one():
    assert config_of("--stop", "\n\n", "--stop", "Q:").sampling.stop == ["\n\n", "Q:"]


def test_the_text_none_is_the_value_none():
    config = config_of("-topk", "None", "-s", "None", "-ed", "None", "--precision", "None")
    assert (config.sampling.top_k, config.data.system_prompt, config.data.eval_dataset, config.model.precision) == (
        None,
        None,
        None,
        None,
    )


def test_none_empties_a_list_that_a_file_has(tmp_path):
    (tmp_path / "config.yaml").write_text("stop: [END]\n")
    assert config_of("--config", str(tmp_path / "config.yaml")).sampling.stop == ["END"]
    assert config_of("--config", str(tmp_path / "config.yaml"), "--stop", "None").sampling.stop == []


def test_an_empty_system_prompt_is_not_the_default_one():
    assert config_of("-s", "").data.system_prompt == ""


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_a_file_sets_fields_and_flags_override_it(yaml_file):
    path = yaml_file("learning_rate: 1e-4\nnum_trainers: 4\nstop: ['x']\ntop_k: None\nwandb: true\n")
    config = config_of("-t", "8", "--config", path, "--no-wandb")
    assert (config.optimizer.learning_rate, config.parallel.num_trainers, config.sampling.stop, config.run.wandb) == (
        1e-4,
        8,
        ["x"],
        False,
    )
    assert config.parallel.num_inferencer == 2, "what neither names keeps its default"


def test_an_empty_file_changes_nothing(yaml_file):
    assert config_of("--config", yaml_file("# nothing\n")) == Config()


@pytest.mark.parametrize(
    "text",
    [
        "model: m\nlearning_rate: 1e-4\nsampling:\n  stop: [x]\n  top_k: None\neval_dataset: {t: e}\n",
        "model:\n  model: m\noptimizer: {learning_rate: 1e-4}\nsampling: {stop: [x]}\n"
        "data:\n  eval_dataset:\n    t: e\nrun:\n",
    ],
)
def test_a_file_may_be_nested_by_section_or_flat_or_both(yaml_file, text):
    expected = config_of("-m", "m", "-lr", "1e-4", "--stop", "x", "-ed", '{"t": "e"}', "-t", "8")
    assert config_of("--config", yaml_file(text), "-t", "8") == expected


def test_a_file_may_use_the_merge_keys_of_yaml(yaml_file):
    path = yaml_file("<<: {seed: 1, top_k: 2}\nseed: 3\n")
    assert config_of("--config", path) == config_of("--seed", "3", "--top-k", "2")


def test_a_flag_overrides_what_a_file_says_in_a_section(yaml_file):
    path = yaml_file("sampling: {temperature: 0.5}\nalgorithm: {algo: DAPO, clip_eps_high: 0.5}\n")
    config = config_of("--config", path, "-temp", "0.7", "-a", "GSPO")
    assert config.sampling.temperature == 0.7
    assert config.algorithm == config_of("-a", "GSPO").algorithm, "the file's parts are another algorithm's"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "seed: 1\ntop_k: 2\nseed: 1\n",
            "seed is set twice, as seed in line 1 and as seed in line 3; keep one of them",
        ),
        (
            "top_k: 2\nsampling:\n  top_p: 0.5\n  top_k: 3\n",
            "top_k is set twice, as top_k in line 1 and as sampling.top_k in line 4; keep one of them",
        ),
        ("run: {seed: 1}\nrun: {wandb: true}\n", "section run is set twice, as run in line 1 and as run in line 2"),
        ("run: {seed: 1,\n  seed: 2}\n", "seed is set twice, as run.seed in line 1 and as run.seed in line 2"),
        ("sampling: {temprature: 1}", "unknown field 'sampling.temprature'; did you mean temperature?"),
        ("sampling: {qqq: 1}", "unknown field 'sampling.qqq'; --help sampling lists the fields"),
        ("sampling: {seed: 1}", "unknown field 'sampling.seed'; it belongs to run"),
        ("samplng: {seed: 1}", "unknown field 'samplng'; did you mean sampling?"),
        ("sampling: 4", "sampling is a section and holds a int; write its fields below it"),
        ("sampling: {temperature: hot}", "--temperature 'hot': Input should be a valid number"),
    ],
)
def test_a_field_that_is_given_twice_or_in_another_section_is_refused_with_its_places(yaml_file, text, message):
    path = yaml_file(text)
    found = refusal("--config", path)
    assert message in found
    assert found.startswith(f"--config {path}: ") or found.startswith("--temperature")
    assert "\n" not in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train_batchsize: 4", "unknown field 'train_batchsize'; did you mean train_batch_size?"),
        ("train-batch-size: 4", "did you mean train_batch_size?"),
        ("qqq: 4", "unknown field 'qqq'; --help lists the fields"),
        ("a: [1", "not YAML"),
        ("- a\n- b", "holds a list; write one 'name: value' a line"),
        ("num_trainers: many", "--num-trainers 'many': Input should be a valid integer"),
        ("tasks:\n  a: {top_p: 0.5}\n  a: {top_p: 0.6}", "a is set twice, in line 2 and in line 3; keep one of them"),
        ("data:\n  dataset:\n    a: x\n    a: y", "a is set twice, in line 3 and in line 4"),
        ("dataset: {a: x, a: y}", "a is set twice, in line 1 and in line 1"),
        ("tasks: &t {a: *t}", "--tasks"),
        ("turn_advantages: off", "--turn-advantages False: is no number (YAML reads on, off, yes and no as true"),
        ("learning_rate: true", "--learning-rate True: is no number"),
        ("seed: yes", "--seed True: is no number"),
        ("tasks: {a: {top_k: on}}", "--tasks 'a': 'top_k': True: is no number"),
        ("5: 4", "unknown field '5'; --help lists the fields"),
        ("null: 4", "unknown field 'None'"),
        ("dataset: [a.jsonl, null]", "--dataset ['a.jsonl', None]: is neither a path nor paths by the name"),
        ("eval_dataset: [5]", "--eval-dataset [5]: Input should be a valid dictionary"),
        ("lora_targets: 5", "--lora-targets 5: give names of layers"),
        ("lora_targets: null", "--lora-targets None: give names of layers"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_cause(yaml_file, text, message):
    assert message in refusal("--config", yaml_file(text))


def test_a_file_that_is_missing_is_refused(tmp_path):
    assert "cannot be read" in refusal("--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--train-batchsize", "4"], "unknown flag --train-batchsize; did you mean --train-batch-size?"),
        (["-zzzz", "4"], "unknown flag -zzzz; --help lists the flags"),
        (["stray"], "unrecognized arguments: stray"),
        (["-t"], "expected one argument"),
        (["-ed", "{bad"], "--eval-dataset '{bad': not JSON"),
        (["--stop", ""], "--stop ['']: an empty text ends every response at its first token; leave it out"),
        (["--tasks", '{"a": {"stop": [""]}}'], "an empty text ends every response"),
        (["--config", ""], "--config '': is empty; give an existing YAML file, or leave it out"),
        (["--config", "a", "--config", "b"], "--config a --config b: one file is read; write all fields into one"),
        (["-ed", '{"a": "x", "a": "y"}'], "not JSON ('a' is given twice)"),
        (["--tasks", '{"a": {"top_p": 0.5}, "a": {}}'], "not JSON ('a' is given twice)"),
        (["-ed", "[1]"], "--eval-dataset [1]: Input should be a valid dictionary"),
        (["-ed", '{"t": 1}'], "--eval-dataset 't': 1: Input should be a valid string"),
        (["-ed", '{"a/b": "x"}'], "the name 'a/b' names metrics and files of results"),
        (
            ["-b", "sglang"],
            "--backend 'sglang': use vllm, transformers, fake or http://HOST:PORT of vLLM or SGLang",
        ),
        (["-b", "http://a:1,http://a:1/"], "http://a:1 is given twice; each server is one engine"),
        (["-b", "ftp://a:1"], "'ftp://a:1' is not the address of a server; write http://HOST:PORT"),
        (["-b", "http://a:1?x=y"], "'http://a:1?...' is not the address of a server"),
        (["-b", "http://u:secret@a:1"], "leave user and password out of the address"),
        (["-temp", "0"], "--temperature '0': Input should be greater than 0"),
        (["-temp", "0.005"], "--temperature '0.005': is below 0.01, the lowest that vLLM samples at; use 0.01 or more"),
        (["-temp", "3"], "--temperature '3': is above 2, the highest that vLLM samples at; use 2 or less"),
        (["--eval-temperature", "0.005"], "--eval-temperature '0.005': is below 0.01"),
        (["-temp", "inf"], "--temperature 'inf': Input should be a finite number"),
        (["-lr", "nan"], "--learning-rate 'nan': Input should be a finite number"),
        (["-t", "1.5"], "--num-trainers '1.5': Input should be a valid integer"),
        (["-topp", "1.1"], "--top-p '1.1': Input should be less than or equal to 1"),
        (["--max-tokens-per-microbatch", "1"], "-microbatch '1': Input should be greater than or equal to 2"),
        (["--keep-checkpoints", "0"], "--keep-checkpoints '0': Input should be greater than or equal to 1"),
        (["-zero", "3"], "--zero-stage '3': Input should be less than or equal to 2"),
        (["-ei", "0"], "--eval-interval 0: use a positive number of steps, or -1 for off"),
        (["-si", "-2"], "--save-interval -2: use a positive number of steps, or -1 for off"),
    ],
)
def test_a_wrong_flag_is_named_with_its_value_and_the_remedy(argv, message):
    assert message in refusal(*argv)


def test_several_wrong_fields_are_told_at_once_one_a_line():
    lines = refusal("-t", "x", "-i", "0", "-b", "sglang").splitlines()
    assert sorted(line.split()[0] for line in lines) == ["--backend", "--num-inferencer", "--num-trainers"]
