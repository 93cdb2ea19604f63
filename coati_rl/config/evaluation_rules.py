"""Check how evaluations are sampled, and by what the best checkpoint is chosen, before anything starts."""

from collections.abc import Collection, Iterator

from coati_rl.algorithms.pass_at_k import ks_of
from coati_rl.config.config import Config
from coati_rl.config.training import TrainingRunConfig


def evaluation_problems(config: Config) -> Iterator[str]:
    """Yield why evaluations cannot be sampled as asked, each with a remedy."""
    yield from keep_best_problems(config.run, config.data.eval_dataset or (), _figures(config))


def keep_best_problems(
    run: TrainingRunConfig, sets: Collection[str], figures: Collection[str] | None = None
) -> Iterator[str]:
    """Check that the metric is one of the evaluations, and that every checkpoint has an evaluation of its weights.

    Args:
        run: of any job.
        sets: names of the evaluation sets.
        figures: of each evaluation; None: they are known with the first evaluation.
    """
    metric = run.keep_best
    if metric is None:
        return
    if not sets or run.eval_interval < 1:
        yield f"--keep-best {metric}: there are no evaluations; give -ed NAME=PATH and -ei"
        return
    known = [f"eval/{name}/{figure}" for name in sets for figure in figures or ("METRIC",)]
    is_known = metric in known if figures else any(metric.startswith(f"eval/{name}/") for name in sets)
    if not is_known:
        yield f"--keep-best {metric}: is no metric of the evaluations; use one of {', '.join(known)}"
    if run.save_interval < 1 or run.save_interval % run.eval_interval:
        nearest = max(1, round(run.save_interval / run.eval_interval)) * run.eval_interval
        yield (
            f"--keep-best with -si {run.save_interval} -ei {run.eval_interval}: a checkpoint that is not evaluated "
            f"cannot be the best; -si must be a multiple of -ei, nearest: -si {nearest}"
        )


def _figures(config: Config) -> list[str]:
    num_samples = config.sampling.eval_samples
    if num_samples == 1:
        return ["accuracy", "reward_mean"]
    return ["accuracy", "reward_mean", f"avg@{num_samples}", *(f"pass@{k}" for k in ks_of(num_samples))]
