"""Test --algo: the values of the presets, precedence, derived values, and a user's own preset."""

from pathlib import Path

import pytest

from coati_rl.build import build_loss
from coati_rl.config import Config
from coati_rl.config.algorithm import AlgorithmConfig
from coati_rl.config.cli import build_config, parse
from coati_rl.config.presets import PRESETS, read_preset
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError
from coati_rl.estimator import load_estimator

NAMES = (
    "CISPO",
    "CLIP_COV",
    "DAPO",
    "DR_GRPO",
    "GMPO",
    "GRPO",
    "GSPO",
    "KL_COV",
    "LUSPO",
    "MAXRL",
    "OPO",
    "PPO",
    "REINFORCE_PP",
    "REINFORCE_PPB",
    "REINFORCE_PP_BASELINE",
    "REMAX",
    "RLOO",
    "SAPO",
    "VESPO",
)
# estimator, whitened, term, ratio, bounds, aggregation, KL's weight, place and estimator
PARTS = {
    "CISPO": ("group_norm", False, "cispo", "token", (1.0, 4.0), "token_level", 0.0, "none", None),
    "DAPO": ("group_norm", False, "clip", "token", (0.2, 0.28), "token_level", 0.0, "none", None),
    "DR_GRPO": ("group_mean", False, "clip", "token", (0.2, 0.2), "constant", 0.0, "none", None),
    "GRPO": ("group_norm", False, "clip", "token", (0.2, 0.2), "sample_level", 0.01, "loss", "k3"),
    "GSPO": ("group_norm", False, "clip", "sequence", (3e-4, 4e-4), "sample_level", 0.0, "none", None),
    "PPO": ("gae", True, "clip", "token", (0.2, 0.2), "token_level", 0.01, "reward", "k1"),
    "REINFORCE_PP": ("reward", True, "clip", "token", (0.2, 0.2), "token_level", 0.01, "reward", "k1"),
    "REINFORCE_PPB": ("group_mean", True, "clip", "token", (0.2, 0.2), "sample_level", 0.01, "reward", "k1"),
    "REINFORCE_PP_BASELINE": ("group_mean", True, "clip", "token", (0.2, 0.2), "token_level", 0.01, "loss", "k2"),
    "SAPO": ("group_norm", False, "sapo", "token", (0.2, 0.2), "sample_level", 0.0, "none", None),
    "CLIP_COV": ("group_norm", False, "clip", "token", (0.2, 0.2), "token_level", 0.0, "none", None),
    "GMPO": ("group_norm", False, "gmpo", "token", (0.4, 0.4), "sample_level", 0.0, "none", None),
    "KL_COV": ("group_norm", False, "clip", "token", (1.0, 1e6), "token_level", 0.0, "none", None),
    "LUSPO": ("group_norm", False, "clip", "sequence", (3e-4, 4e-4), "constant", 0.0, "none", None),
    "MAXRL": ("max_rl", False, "clip", "token", (0.2, 0.2), "token_level", 0.0, "none", None),
    "OPO": ("opo", False, "clip", "token", (0.2, 0.2), "constant", 0.0, "none", None),
    "VESPO": ("group_norm", False, "vespo", "token", (0.2, 0.2), "token_level", 0.0, "none", None),
    "REMAX": ("remax", False, "clip", "token", (0.2, 0.2), "constant", 0.01, "reward", "k1"),
    "RLOO": ("leave_one_out", False, "clip", "token", (0.2, 0.2), "constant", 0.01, "reward", "k1"),
}


def config_of(text: str) -> Config:
    return parse(text.split())[0]


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(text)
    return str(caught.value)


def write(directory: Path, text: str, name: str = "mine.yaml") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def test_there_are_nineteen_presets_by_their_papers_names():
    assert tuple(sorted(PRESETS)) == tuple(sorted(NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_sets_the_parts_of_its_paper(name):
    config = config_of(f"-a {name}")
    found = (
        config.algorithm.advantage_estimator,
        config.algorithm.whiten_advantages,
        config.algorithm.policy_loss,
        config.algorithm.ratio_level,
        (config.algorithm.clip_eps_low, config.algorithm.clip_eps_high),
        config.algorithm.loss_variation,
        config.algorithm.kl_coeff,
        config.algorithm.kl_place,
        config.algorithm.kl_estimator if config.algorithm.kl_coeff else None,
    )
    assert found == PARTS[name]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_preset_passes_all_rules_and_can_be_built(name):
    config = config_of(f"-a {name}")
    check(config)
    assert build_loss(config.algorithm).kl_coeff == (
        config.algorithm.kl_coeff if config.algorithm.kl_place == "loss" else 0
    )
    estimator = config.algorithm.advantage_estimator
    assert load_estimator(estimator).__name__ == {"gae": "reward"}.get(estimator, estimator)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_names_its_paper_and_sets_settings_of_an_algorithm_alone(name):
    assert "arXiv:" in PRESETS[name].read_text(encoding="utf-8")
    assert set(read_preset(name, AlgorithmConfig.model_fields)) <= set(AlgorithmConfig.model_fields) - {"algo"}


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        ("--policy-loss cispo", "policy_loss", "cispo"),
        ("--ratio-level sequence", "ratio_level", "sequence"),
        ("--clip-eps-low 0.11", "clip_low", 0.11),
        ("--clip-eps-high 0.12", "clip_high", 0.12),
        ("--clip-dual 3.5", "clip_dual", 3.5),
        ("-kl 0.13", "kl_coeff", 0.13),
        ("-kl 0.13 --kl-place reward", "kl_coeff", 0.0),
        ("--kl-estimator k2", "kl_estimator", "k2"),
        ("--kl-bias-correction", "kl_has_ratio", True),
        ("--off-policy-mask-threshold 0.5", "drift_threshold", 0.5),
        ("--policy-loss vespo --vespo-positive 1,2", "vespo_positive", (1.0, 2.0)),
        ("--policy-loss vespo --vespo-negative 1,2", "vespo_negative", (1.0, 2.0)),
        ("--token-selection kl_cov --kl-cov-coeff 2", "hold_coeff", 2.0),
        ("--entropy-coeff 0.14", "entropy_coeff", 0.14),
        ("--off-policy-correction icepop", "correction", "icepop"),
        ("--off-policy-correction icepop --off-policy-low 0.15", "correction_low", 0.15),
        ("--skip-threshold 16", "skip_threshold", 16.0),
        ("--skip-threshold None", "skip_threshold", None),
    ],
)
def test_every_part_that_is_chosen_reaches_the_loss(argv, name, value):
    assert getattr(build_loss(config_of(argv).algorithm), name) == value


def test_the_defaults_of_the_fields_are_those_of_grpo():
    without = {name: field.default for name, field in AlgorithmConfig.model_fields.items()}
    assert config_of("").flat() == config_of("-a GRPO").flat()
    assert config_of("-a GRPO").algorithm.model_dump() == without


def test_dapo_filters_groups_replaces_them_and_punishes_length():
    config = config_of("-a DAPO -mnt 2048")
    assert config.algorithm.filter_range == (0.0, 1.0)
    assert config.algorithm.dynamic_batching
    assert config.algorithm.filter_truncated_response
    assert config.over_length_cache == 512  # min(1024, 2048 / 4)
    assert config_of("-a DAPO -mnt 8192").over_length_cache == 1024
    assert config_of("-a DAPO -mnt 2").over_length_cache == 1
    assert config_of("-a DAPO --cache-length 100").over_length_cache == 100
    assert config_of("-a GRPO").over_length_cache is None


@pytest.mark.parametrize("spelling", ["dapo", "Dapo", "DAPO"])
def test_a_presets_name_may_be_written_in_any_case(spelling):
    assert config_of(f"-a {spelling}").algorithm.algo == "DAPO"
    assert config_of(f"-a {spelling}").algorithm.loss_variation == "token_level"


def test_what_is_given_wins_over_the_preset():
    config = config_of("-a DAPO --clip-eps-high 0.3 --loss-variation sample_level --no-dynamic-batching")
    assert (config.algorithm.clip_eps_low, config.algorithm.clip_eps_high) == (0.2, 0.3)
    assert config.algorithm.loss_variation == "sample_level"
    assert not config.algorithm.dynamic_batching
    assert config_of("-a DAPO --filter-range None").algorithm.filter_range is None


def test_what_a_config_file_gives_wins_over_the_preset_and_a_flag_over_both(tmp_path):
    path = write(tmp_path, "algo: DAPO\nclip_eps_high: 0.3\nclip_eps_low: 0.1\n")
    config = config_of(f"--config {path} --clip-eps-low 0.15")
    assert (config.algorithm.algo, config.algorithm.clip_eps_low, config.algorithm.clip_eps_high) == ("DAPO", 0.15, 0.3)
    assert config_of(f"--config {path} -a GSPO").algorithm.ratio_level == "sequence"


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "REINFORCE_PP_BASELINE"])
@pytest.mark.parametrize("zero", ["0", "0.0", "0e3"])
def test_kl_of_no_weight_has_no_place_unless_one_is_given(name, zero):
    assert config_of(f"-a {name} -kl {zero}").algorithm.kl_place == "none"
    assert config_of(f"-a {name} -kl {zero} --kl-place loss").algorithm.kl_place == "loss"
    assert build_config({"algo": name, "kl_coeff": 0}).algorithm.kl_place == "none"


@pytest.mark.parametrize(("name", "place"), [("DAPO", "loss"), ("GSPO", "loss"), ("RLOO", "reward")])
def test_kl_of_some_weight_has_the_presets_place(name, place):
    assert config_of(f"-a {name} -kl 0.05").algorithm.kl_place == place


@pytest.mark.parametrize(
    ("correction", "low", "high"),
    [("tis", 0.0, 2.0), ("icepop", 0.5, 5.0), ("sequence_mask", 0.5, 2.0), ("sequence_mask_tis", 0.5, 5.0)],
)
def test_a_correction_without_bounds_has_its_papers(correction, low, high):
    config = config_of(f"--off-policy-correction {correction}")
    assert (config.algorithm.off_policy_low, config.algorithm.off_policy_high) == (low, high)
    given = config_of(f"--off-policy-correction {correction} --off-policy-high 7")
    assert (given.algorithm.off_policy_low, given.algorithm.off_policy_high) == (low, 7.0)
    loss = build_loss(given.algorithm)
    assert (loss.correction, loss.correction_low, loss.correction_high) == (correction, low, 7.0)


def test_bounds_of_none_as_a_resolved_config_has_them_are_the_corrections_own(tmp_path):
    path = write(tmp_path, "off_policy_low: null\noff_policy_high: null\n")
    config = config_of(f"--config {path} --off-policy-correction tis")
    assert (config.algorithm.off_policy_low, config.algorithm.off_policy_high) == (0.0, 2.0)


def test_without_a_correction_there_are_no_bounds():
    assert (config_of("").algorithm.off_policy_low, config_of("").algorithm.off_policy_high) == (None, None)


def test_a_resolved_config_read_again_is_the_same():
    config = config_of("-a DAPO --off-policy-correction icepop -kl 0")
    assert build_config(config.flat("json")) == config


def test_a_file_of_the_users_own_is_a_preset(tmp_path):
    parts = ("advantage_estimator: group_mean", "clip_eps_high: 0.4", "kl_coeff: 0", "off_policy_correction: tis")
    path = write(tmp_path, "\n".join(parts))
    config = config_of(f"-a {path}")
    assert config.algorithm.advantage_estimator == "group_mean"
    assert config.algorithm.clip_eps_high == 0.4
    assert config.algorithm.clip_eps_low == 0.2  # what it leaves out is GRPO's
    assert config.algorithm.kl_place == "none"
    assert config.algorithm.off_policy_high == 2.0
    assert config_of(f"-a {path} --clip-eps-high 0.1").algorithm.clip_eps_high == 0.1
    check(config)


def test_an_empty_file_is_grpo(tmp_path):
    config = config_of(f"-a {write(tmp_path, '')}")
    assert config.flat() == config_of("").flat() | {"algo": config.algorithm.algo}


@pytest.mark.parametrize("name", ["SFT", "VPG", "grpo2", "dapo.json"])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    message = refusal(f"-a {name}")
    assert message.startswith(f"--algo {name!r}: unknown; use CISPO, CLIP_COV, DAPO, DR_GRPO, GMPO, ")
    assert message.endswith("or a FILE.yaml of your own")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clip_eps: 0.2", "sets clip_eps, which is no setting of an algorithm"),
        ("num_trainers: 4\nmodel: a/b", "sets num_trainers, model, which is no setting of an algorithm"),
        ("algo: GRPO", "sets algo, which is no setting of an algorithm"),
        ("- 1\n- 2", "holds a list; write one 'name: value' a line"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_file_that_is_no_preset_is_refused_by_its_name(tmp_path, text, message):
    path = write(tmp_path, text)
    found = refusal(f"-a {path}")
    assert found.startswith(f"--algo {path}: ")
    assert message in found
    assert "\n" not in found


def test_a_file_that_is_missing_is_refused(tmp_path):
    assert f"--algo {tmp_path}/none.yaml: cannot be read" in refusal(f"-a {tmp_path}/none.yaml")


def test_a_value_in_a_preset_that_its_field_refuses_is_told_as_the_flag(tmp_path):
    path = write(tmp_path, "clip_eps_low: 2.0\nkl_coeff: abc\nratio_level: word\n")
    message = refusal(f"-a {path}")
    for part in ("--clip-eps-low 2.0", "--kl-coeff 'abc'", "--ratio-level 'word'"):
        assert part in message
