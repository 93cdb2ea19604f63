"""Check how evaluations are sampled, before anything starts."""

from collections.abc import Iterator

from coati_rl.config.config import Config


def evaluation_problems(config: Config) -> Iterator[str]:
    """Yield why evaluations cannot be sampled as asked, each with a remedy."""
    sampling = config.sampling
    if sampling.eval_temperature > 0:
        return
    if sampling.eval_samples > 1:
        yield (
            f"--eval-samples {sampling.eval_samples}: greedy answers to a prompt are all the same; "
            "give --eval-temperature 1, or leave --eval-samples out"
        )
    if sampling.eval_top_p < 1:
        yield (
            f"--eval-top-p {sampling.eval_top_p:g}: has no effect on greedy answers; "
            "give --eval-temperature 1, or leave --eval-top-p out"
        )
