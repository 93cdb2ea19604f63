"""Check what follows the policy during a run, and which tokens are selected: settings without effect are refused."""

from collections.abc import Iterator, Mapping

from coati_rl.config.algorithm import AlgorithmConfig
from coati_rl.config.config import Config
from coati_rl.config.fields import Section, given_flags
from coati_rl.errors import ConfigError

MIN_BF16_MIX = 0.1  # a movement of less than half a unit in the last place is rounded away


def control_problems(config: Config) -> Iterator[str]:
    """Why the weights or the reference cannot follow the policy like this, each with a remedy."""
    control, algorithm = config.control, config.algorithm
    if control.kl_controller == "fixed":
        yield from _without_effect(control, ("kl_target", "kl_horizon"), "--kl-controller adaptive")
    elif algorithm.kl_coeff == 0:
        yield "--kl-controller adaptive without KL: has no weight to adapt; give a -kl above 0, or leave it out"
    if control.entropy_target is None:
        yield from _without_effect(control, ("entropy_coeff_delta", "entropy_coeff_max"), "--entropy-target")
    elif algorithm.entropy_coeff > control.entropy_coeff_max:
        yield (
            f"--entropy-coeff {algorithm.entropy_coeff:g} exceeds --entropy-coeff-max {control.entropy_coeff_max:g}: "
            "begin with less, or allow more"
        )
    if control.reference_update is not None and algorithm.kl_coeff == 0:
        yield (
            f"--reference-update {control.reference_update} without KL: there is no reference; give a -kl above 0, "
            "or leave it out"
        )


def selection_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Why tokens cannot be selected like this, each with a remedy."""
    selection = algorithm.token_selection
    settings: Mapping[str, tuple[str, ...]] = {
        "token_fraction": ("top_entropy", "clip_cov", "kl_cov"),
        "token_covariance": ("clip_cov",),
        "kl_cov_coeff": ("kl_cov",),
    }
    for name, uses in settings.items():
        if selection not in uses:
            yield from _without_effect(algorithm, (name,), f"--token-selection {' or '.join(uses)}")
    low, high = algorithm.token_covariance
    if not low < high:
        yield f"--token-covariance {low:g},{high:g}: give two numbers in order, like 1,5"


def check_reference(config: Config, precision: str) -> None:
    """Raise ConfigError for a reference that bfloat16 would keep from moving."""
    moves = config.control.reference_moves
    if moves is not None and precision == "bf16" and moves.mix < MIN_BF16_MIX:
        raise ConfigError(
            f"--reference-update {config.control.reference_update} with --precision bf16: moves the reference by "
            f"{moves.mix:g} of a difference, and bfloat16 rounds away what is below half a unit in the last place; use "
            f"every=N with mix={MIN_BF16_MIX:g} or more, or --precision fp32"
        )


def _without_effect(section: Section, names: tuple[str, ...], needed: str) -> Iterator[str]:
    if given := given_flags(section, names):
        yield f"{' and '.join(given)} without {needed}: has no effect; add that, or leave it out"
