"""Check how evaluations are sampled, and by what the best checkpoint is chosen, before anything starts."""

from collections.abc import Iterator

from coati_rl.algorithms.pass_at_k import ks_of
from coati_rl.config.config import Config
from coati_rl.config.training import TrainingConfig


def evaluation_problems(config: TrainingConfig) -> Iterator[str]:
    """Yield why there are no evaluations as asked, each with a remedy.

    The metric of the best checkpoint must be one of them, and every checkpoint must have an evaluation of its weights.
    """
    run, sets = config.run, config.setting("eval_dataset", None) or ()
    figures = _figures(config) if isinstance(config, Config) else None  # of a job they come with the first evaluation
    if run.eval_interval > 0 and not sets:
        yield f"--eval-interval {run.eval_interval}: needs --eval-dataset, or -1 to switch it off"
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
