"""Test --config FILE with flags: a config.yaml holds every setting; values derived from a flag are derived again."""

import pytest
import yaml

from coati_rl.config import Config
from coati_rl.config.algorithm_rules import algorithm_problems
from coati_rl.config.cli import parse
from coati_rl.errors import ConfigError


@pytest.fixture
def resolved(tmp_path):
    """Flags -> the config.yaml of a run with them."""

    def write(flags):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(parse(flags.split())[0].flat("json")))
        return path

    return write


def read(path, flags=""):
    config, _ = parse(["--config", str(path), *flags.split()])
    assert list(algorithm_problems(config)) == []
    return config


@pytest.mark.parametrize("flags", ["-a DAPO", "-a GRPO -kl 0", "-a GSPO --off-policy-correction tis", "--clip-dual 3"])
def test_alone_it_is_the_same_run(resolved, flags):
    assert read(resolved(flags)) == parse(flags.split())[0]


def test_another_algorithm_is_the_presets_and_keeps_what_is_the_runs(resolved):
    config = read(resolved("-a GRPO --clip-eps-high 0.5 -lr 1e-3 --weight-decay 0.2 -t 4"), "-a dapo")
    expected = parse(["-a", "DAPO", "-lr", "1e-3", "--weight-decay", "0.2", "-t", "4"])[0]
    assert config == expected


def test_the_same_algorithm_keeps_the_files_parts(resolved):
    assert read(resolved("-a DAPO --clip-eps-high 0.5"), "-a dapo").algorithm.clip_eps_high == 0.5


def test_a_file_that_names_no_algorithm_overrides_parts_of_the_flags(tmp_path):
    path = tmp_path / "parts.yaml"
    path.write_text("clip_eps_high: 0.5\n")
    config = read(path, "-a DAPO")
    assert (config.algorithm.algo, config.algorithm.clip_eps_high, config.algorithm.loss_variation) == (
        "DAPO",
        0.5,
        "token_level",
    )


def test_kl_switched_off_or_on_has_no_place_or_the_presets(resolved):
    assert read(resolved("-a RLOO"), "-kl 0").algorithm.kl_place == "none"
    assert read(resolved("-a RLOO -kl 0"), "-kl 0.1").algorithm.kl_place == "reward"


def test_another_correction_has_its_own_bounds_and_none_has_none(resolved):
    path = resolved("--off-policy-correction tis --off-policy-high 3")
    assert read(path).algorithm.off_policy_high == 3.0
    icepop = read(path, "--off-policy-correction icepop")
    assert (icepop.algorithm.off_policy_low, icepop.algorithm.off_policy_high) == (0.5, 5.0)
    none = read(path, "--off-policy-correction none")
    assert (none.algorithm.off_policy_low, none.algorithm.off_policy_high) == (None, None)
    given = read(resolved(""), "--off-policy-correction tis --off-policy-low None")
    assert (given.algorithm.off_policy_low, given.algorithm.off_policy_high) == (0.0, 2.0)


@pytest.mark.parametrize("flag", ["--config", "--algo"])
def test_a_date_that_does_not_exist_is_refused_with_the_files_name(tmp_path, flag):
    path = tmp_path / "dated.yaml"
    path.write_text("clip_eps_low: 2026-13-01\n")
    with pytest.raises(ConfigError, match=f"{flag} {path}.*month must be in 1..12"):
        parse([flag, str(path)])


def test_a_setting_that_a_preset_has_twice_is_refused_with_its_lines(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("kl_coeff: 0.1\nclip_eps_low: 0.3\nkl_coeff: 0.2\n")
    with pytest.raises(ConfigError, match=f"--algo {path}: kl_coeff is set twice, in line 1 and in line 3"):
        parse(["--algo", str(path)])


def test_a_wrong_value_in_a_preset_is_told_with_the_presets_name(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("clip_eps_low: abc\nskip_threshold: None\n")
    with pytest.raises(ConfigError) as caught:
        parse(["--algo", str(path)])
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"--clip-eps-low 'abc' (set by --algo {path}): ")


def test_a_preset_of_ones_own_is_found_again_from_another_directory(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("clip_eps_low: 0.1\n")
    monkeypatch.chdir(tmp_path)
    config = parse(["--algo", "mine.yaml"])[0]
    monkeypatch.chdir("/")
    assert Config(**config.flat()) == config


@pytest.mark.parametrize("value", ["0.01", "[0.01,0.99]", "0.1,0.2,0.3", "a,b"])
def test_a_filter_range_that_is_no_pair_is_refused_with_its_form(value):
    with pytest.raises(ConfigError) as caught:
        parse(["--filter-range", value])
    assert str(caught.value).startswith("--filter-range ")
    assert "LOW,HIGH" in str(caught.value)
