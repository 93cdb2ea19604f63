"""Print the rollouts of a step as conversations: `coati-rl show RUN`, best and worst answers of each prompt first."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from coati_rl.errors import CoatiError, ConfigError
from coati_rl.flag_numbers import integer_from
from coati_rl.run_reader.rollout import RecordedRollout
from coati_rl.run_reader.run_directory import RunDirectory
from coati_rl.text import count, printable, shorten

_PROG = "coati-rl show"


def choose(group: Sequence[RecordedRollout], number: int) -> list[RecordedRollout]:
    """Return the `number` best and worst answers by reward, those that were not scored last; the best first."""
    ranked = sorted(group, key=lambda each: -float("inf") if each.reward is None else each.reward, reverse=True)
    return ranked if 2 * number >= len(ranked) else [*ranked[:number], *ranked[len(ranked) - number :]]


def lines_of(run: RunDirectory, *, step: int | None, uid: str | None, number: int, width: int) -> Iterator[str]:
    """Yield what is printed.

    Args:
        run: whose rollouts.
        step: optimizer step, from 1; None: the last one that has rollouts.
        uid: of one prompt; None: all.
        number: answers of each prompt from the best on, and as many from the worst.
        width: characters of a message; the rest is left out, which is said.
    Raises: ConfigError if there are none.
    """
    steps = run.steps()
    state = "running" if run.is_running() else "not running"
    saved = [path.name for path in run.checkpoints()]
    yield f"{run.path}: {state}, {count(len(steps), 'step')}, {saved[-1] if saved else 'no checkpoint'}"
    step = _last_step(run) if step is None else step
    found = [each for each in run.rollouts(step) if uid in (None, each.uid)]
    if not found:
        of_prompt = "" if uid is None else f" of prompt {uid}"
        raise ConfigError(f"{run.path}: no rollout{of_prompt} is recorded for step {step}")
    metrics = next((each for each in steps if each.get("step") == step), {})
    figures = [
        f"{name} {metrics[name]:.4g}" for name in ("reward_mean", "loss", "grad_norm") if metrics.get(name) is not None
    ]
    yield f"step {step}: {count(len(found), 'rollout')}{''.join(f', {each}' for each in figures)}"
    for prompt, group in groupby(sorted(found, key=lambda each: each.uid), key=lambda each: each.uid):
        rollouts = [*group]
        rewards = " ".join("-" if each.reward is None else f"{each.reward:g}" for each in rollouts)
        trained = sum(each.is_trained for each in rollouts)
        truth = shorten(printable(rollouts[0].truth))
        yield f"\n{prompt}: rewards {rewards}; {trained} of {len(rollouts)} trained; ground truth: {truth}"
        yield _message("prompt", rollouts[0].prompt, width)
        for each in choose(rollouts, number):
            yield from _answer(each, width)


def _answer(rollout: RecordedRollout, width: int) -> Iterator[str]:
    reward = "not scored" if rollout.reward is None else f"reward {rollout.reward:g}"
    advantage = "not trained" if rollout.advantage is None else f"advantage {rollout.advantage:+.3g}"
    versions = "-".join(dict.fromkeys(map(str, rollout.policy_versions)))
    why = f" ({shorten(printable(rollout.detail), 120)})" if rollout.detail else ""
    yield (
        f"  sample {rollout.sample}: {reward}, {rollout.verdict}{why}, {advantage}, "
        f"{count(rollout.num_tokens, 'token')}, {rollout.finish_reason}, version {versions or '-'}"
    )
    for role, said in rollout.conversation():
        yield _message(role, said, width)


def _message(role: str, said: str, width: int) -> str:
    left = len(said) - width
    text = printable(said[:width]) + (f" ... {left} more characters" if left > 0 else "")
    return f"    {printable(role)}: " + text.replace("\n", "\n      ")


def _last_step(run: RunDirectory) -> int:
    last = run.last_rollout_step()
    if last is None:
        raise ConfigError(f"{run.path}: no rollout is recorded; a job on a dataset has none")
    return last


def main(arguments: Sequence[str] | None = None) -> int:
    """Print rollouts. Returns: the exit code."""
    parser = argparse.ArgumentParser(prog=_PROG, description=__doc__)
    parser.add_argument("run", type=Path, help="directory of a run, also of one that goes on")
    of_steps = "optimizer step, from 1; default: the last one with rollouts"
    parser.add_argument("--step", type=integer_from(1), help=of_steps)
    parser.add_argument("--uid", help="of one prompt, as the lines name it")
    parser.add_argument(
        "-n", type=integer_from(1), default=1, help="answers of a prompt, best and worst; default: 1 of each"
    )
    parser.add_argument("--width", type=integer_from(1), default=2000, help="characters of a message; default: 2000")
    given = parser.parse_args(arguments)
    try:
        run = RunDirectory(given.run)
        for line in lines_of(run, step=given.step, uid=given.uid, number=max(1, given.n), width=max(1, given.width)):
            sys.stdout.write(line + "\n")
    except BrokenPipeError:  # of a pager that was closed
        sys.stderr.close()
    except CoatiError as error:
        sys.stderr.write(f"{_PROG}: {error}\n")
        return 2
    return 0
