"""Check a distillation's rewards; odd combinations are warned about."""

from collections.abc import Iterator

from coati_rl.config.config import Config
from coati_rl.reward_spec import NO_REWARD


def distillation_problems(config: Config) -> Iterator[str]:
    """Why the policy cannot be distilled like this, each with a remedy."""
    unrewarded = [name for name, each in config.by_task.items() if each.reward.reward_type == NO_REWARD]
    if unrewarded and not config.distillation.distill_only:
        yield (
            f"--reward-type {NO_REWARD}: nothing is learned from rewards that are all 0; give --teacher MODEL "
            "--distill-only, or another reward"
        )
    if unrewarded and config.data.eval_dataset:
        yield (
            f"--eval-dataset with --reward-type {NO_REWARD}: nothing says which answers are right; "
            "leave one of them out"
        )


def distillation_warnings(config: Config) -> Iterator[str]:
    """Return what can be run, and is hardly meant."""
    algorithm = config.algorithm
    if not config.distillation.distill_only:
        return
    if algorithm.filter_range is not None:
        low, high = algorithm.filter_range
        yield (
            f"--distill-only with --filter-range {low:g},{high:g}: rewards still decide which groups are trained; "
            "--filter-range None trains all"
        )
    if algorithm.soft_over_length_punishment:
        yield "--distill-only with --soft-over-length-punishment: has no effect, as rewards are only reported"
    if algorithm.kl_coeff > 0:
        yield (
            f"--distill-only with -kl {algorithm.kl_coeff:g}: KL to the start model holds the policy back from the "
            "teacher; -kl 0 leaves it out"
        )
