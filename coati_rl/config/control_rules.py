"""Check what follows the policy during a run: the weight of the entropy bonus, the reference."""

from collections.abc import Iterator

from coati_rl.config.config import Config
from coati_rl.errors import ConfigError

MIN_BF16_MIX = 0.1  # a movement of less than half a unit in the last place is rounded away


def control_problems(config: Config) -> Iterator[str]:
    """Why the weight of the entropy bonus cannot follow the policy like this, with a remedy."""
    control, algorithm = config.control, config.algorithm
    if control.entropy_target is not None and algorithm.entropy_coeff > control.entropy_coeff_max:
        yield (
            f"--entropy-coeff {algorithm.entropy_coeff:g} exceeds --entropy-coeff-max {control.entropy_coeff_max:g}: "
            "begin with less, or allow more"
        )


def check_reference(config: Config, precision: str) -> None:
    """Raise ConfigError for a reference that bfloat16 would keep from moving."""
    moves = config.control.reference_moves
    if moves is not None and precision == "bf16" and moves.mix < MIN_BF16_MIX:
        raise ConfigError(
            f"--reference-update {config.control.reference_update} with --precision bf16: moves the reference by "
            f"{moves.mix:g} of a difference, and bfloat16 rounds away what is below half a unit in the last place; use "
            f"every=N with mix={MIN_BF16_MIX:g} or more, or --precision fp32"
        )
