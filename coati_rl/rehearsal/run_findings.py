"""Read what a rehearsal's small run has shown: how long its parts took, and which samples had no score, and why."""

from collections import Counter
from collections.abc import Iterator

from coati_rl.config import Config
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import RunError
from coati_rl.run_reader.run_directory import RunDirectory
from coati_rl.text import count, shorten


def finding(run: RunDirectory) -> str:
    """Return what was done, in one line."""
    steps, syncs, evaluations = run.steps(), run.syncs(), run.evaluations()
    parts = [count(len(steps), "step")]
    parts += [count(len(syncs), "weight sync")] if syncs else []
    parts += [count(len(evaluations), "evaluation")] if evaluations else []
    parts.append(count(len(run.checkpoints()), "checkpoint"))
    gaps = [step["logprob_gap_mean"] for step in steps if step.get("logprob_gap_mean") is not None]
    if gaps:
        parts.append(f"engine and trainer {max(gaps):.2g} nats apart")
    return ", ".join(parts)


def failures(run: RunDirectory, config: TrainingConfig) -> Iterator[str]:
    """Yield why samples had no score. Raises: RunError if none of them had one."""
    if not isinstance(config, Config):
        return
    rollouts = [*run.rollouts()]
    why = Counter(shorten(each.detail or each.verdict) for each in rollouts if each.verdict == "invalid")
    number = sum(why.values())
    if not number:
        return
    text = "; ".join(f"{times} x {cause}" for cause, times in why.most_common(3))
    if number == len(rollouts):
        raise RunError(f"none of {number} samples has a score: {text}")
    rate = config.run.max_failure_rate
    limit = f", and --max-failure-rate {rate:g} stops a run" if number / len(rollouts) > rate else ""
    yield f"{number} of {len(rollouts)} samples have no score{limit}: {text}"
