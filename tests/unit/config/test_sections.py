"""A configuration in sections: how it is made, read by flat name, changed, and what each field says of itself."""

import pytest
from pydantic import ValidationError

from coati_rl.config import Config
from coati_rl.config.algorithm import AlgorithmConfig
from coati_rl.config.cli import build_config, parse
from coati_rl.config.fields import role_of
from coati_rl.config.sampling import SamplingConfig
from coati_rl.errors import ConfigError

SECTIONS = [
    "model", "data", "sampling", "environment", "reward", "algorithm", "control", "critic", "distillation", "lora",
    "optimizer",
    "parallel", "cluster", "sync", "run",
]  # fmt: skip


def test_a_field_is_in_one_section_only_so_that_its_flat_name_is_enough():
    names = [name for section in Config.sections().values() for name in section.model_fields]
    assert list(Config.sections()) == SECTIONS
    assert len(names) == len(set(names)) == len(Config.fields())
    assert {name for name in names if name in SECTIONS} == {"model", "optimizer"}, "each in its own"


@pytest.mark.parametrize(
    "values",
    [
        {"model": "m", "temperature": 0.5, "top_k": 3},
        {"model": {"model": "m"}, "sampling": {"temperature": 0.5, "top_k": 3}},
        {"model": "m", "sampling": SamplingConfig(temperature=0.5), "top_k": 3},
        {"model": {"model": "m"}, "sampling": {"temperature": 0.5}, "top_k": 3, "data": {}},
    ],
)
def test_flat_nested_and_mixed_values_make_the_same_configuration(values):
    config = build_config(values)
    assert config == parse(["-m", "m", "-temp", "0.5", "-topk", "3"])[0]
    assert (config.model.model, config.sampling.temperature, config.sampling.top_k) == ("m", 0.5, 3)


@pytest.mark.parametrize(
    ("values", "flags"),
    [
        ({"context_parallel": 2}, ["--context-parallel", "2"]),
        ({"parallel": {"expert_parallel": 2}}, ["--expert-parallel", "2"]),
        ({"data": {"label_key": "a"}, "input_key": "p"}, ["--label-key", "a", "--input-key", "p"]),
    ],
)
def test_a_field_may_be_called_as_its_flag_is(values, flags):
    assert build_config(values) == Config(**values) == parse(flags)[0]


def test_the_flat_form_holds_every_field_once_and_makes_the_same_configuration():
    config = parse(["-a", "DAPO", "-m", "m", "-temp", "0.5", "--stop", "x", "-lr", "1e-3"])[0]
    assert list(config.flat()) == list(Config.fields())
    assert config.flat()["filter_range"] == (0.0, 1.0)
    assert config.flat("json")["filter_range"] == [0.0, 1.0]
    assert Config(**config.flat()) == Config(**config.flat("json")) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.5, "sampling": {"temperature": 0.5}}, "temperature is set twice, as temperature and as "),
        ({"context_parallel": 2, "context_parallel_size": 2}, "context_parallel_size is set twice, as "),
        ({"sampling": {"context_parallel": 2}}, "unknown field 'sampling.context_parallel'; it belongs to parallel"),
        ({"sampling": {"seed": 1}}, "unknown field 'sampling.seed'; it belongs to run"),
        ({"sampling": {"sed": 1}}, "unknown field 'sampling.sed'"),
        ({"sampling": 3}, "sampling is a section and holds a int; write its fields below it"),
        ({"sed": 1}, "unknown field 'sed'; did you mean seed?"),
        ({"sampling": {"temperature": 0}}, "--temperature 0: Input should be greater than 0"),
    ],
)
def test_values_that_do_not_fit_the_sections_are_refused(values, message):
    with pytest.raises(ConfigError) as caught:
        build_config(values)
    assert str(caught.value).startswith(message)


def test_changes_by_flat_name_go_to_their_sections_and_leave_the_original_alone():
    config = build_config({"model": "m"})
    changed = config.with_changes(model="n", temperature=0.5, seed=3)
    assert changed == build_config({"model": "n", "temperature": 0.5, "seed": 3})
    assert config == build_config({"model": "m"})
    assert changed.parallel is config.parallel
    with pytest.raises(KeyError, match="temprature"):
        config.with_changes(temprature=0.5)


def test_a_configuration_and_its_sections_cannot_be_changed_in_place():
    config = Config()
    for target, name in ((config, "sampling"), (config.sampling, "temperature")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(target, name, getattr(target, name))


def test_an_algorithm_alone_has_its_presets_parts():
    assert AlgorithmConfig(algo="dapo") == Config(algo="DAPO").algorithm


def test_a_preset_of_ones_own_may_set_the_optimizer(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("learning_rate: 1.0e-3\nclip_eps_high: 0.4\n")
    config = build_config({"algo": str(path), "optimizer": {"weight_decay": 0.2}})
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (1e-3, 0.2)
    assert config.algorithm.clip_eps_high == 0.4
    assert build_config({"algo": str(path), "learning_rate": 1e-4}).optimizer.learning_rate == 1e-4


def test_every_field_says_its_role():
    roles = {name: role_of(field) for name, field in Config.fields().items()}
    assert set(roles.values()) == {"experiment", "execution"}
    assert {roles[name] for name in ("learning_rate", "temperature", "dataset", "seed", "precision")} == {"experiment"}
    assert {roles[name] for name in ("num_trainers", "run_dir", "zero_stage", "reward_workers")} == {"execution"}


def test_an_optimizer_is_a_field_by_a_name_and_a_section_by_its_fields():
    assert build_config({"optimizer": "/own.py:make"}).optimizer.optimizer == "/own.py:make"
    nested = build_config({"optimizer": {"optimizer": "/own.py:make", "learning_rate": 1e-4}}).optimizer
    assert (nested.optimizer, nested.learning_rate) == ("/own.py:make", 1e-4)
