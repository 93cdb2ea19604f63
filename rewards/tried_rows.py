"""Try a run's reward on rows of its whole dataset before the run: what raises, what hangs, what is slow.

Each row is scored for its ground truth in the form that the reward asks for and for an empty response, the longest rows
for a long response of odd text as well, by the run's own scoring processes. Rows come in an order that covers the
dataset evenly, the first and the longest ones first, until all are tried or the time is over.
"""

import random
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from coati_rl.config import Config
from coati_rl.config.reward import reward_spec
from coati_rl.errors import RunError
from coati_rl.reward_spec import (
    ENVIRONMENT_REWARD,
    NO_REWARD,
    is_model,
    is_url,
    parse_reward_type,
    public_reward_type,
)
from coati_rl.text import shorten
from coati_rl.types import Prompt, Score
from rewards.first_prompt import answers_for
from rewards.scorer import scorer_factory

if TYPE_CHECKING:
    from coati_rl.preflight.prepared_run import Prepared

_NUM_FIRST = 4  # rows that are tried before the others
_NUM_LONGEST = 8
_MAX_OF_SERVICE = 32  # rows that are sent to a service, which is not ours
# Repeated: what a policy that has collapsed writes.
_LONG = "1 + \u00e9 \u4e2d\u6587 \U0001f600 \\frac{1}{2} \u0007</answer> "
_MAX_LONG = 2**16  # characters
_CONNECT_S = 5.0
_TRIAL_S = 10.0  # for a response: one that takes longer is slow, whatever --reward-timeout-s allows
_FAST_S = 1.0  # where the median response is faster, one that takes _TRIAL_S hangs
_WORKERS = 2
_TIMED_OUT = "timed out"


@dataclass(kw_only=True, slots=True)
class TriedRows:
    """Hold what was found."""

    num_rows: int  # of the dataset, as far as they are read
    trial_s: float = _TRIAL_S  # for a row's responses
    num_tried: int = 0
    seconds: list[float] = field(default_factory=list)  # of each row's responses
    slowest: str = ""  # uid
    failed: dict[str, str] = field(default_factory=dict)  # uid -> why none of the row's responses has a score
    partly: dict[str, str] = field(default_factory=dict)  # uid -> why some response has none
    hung: list[str] = field(default_factory=list)  # uids

    @property
    def median_s(self) -> float:
        """Return the median time of a row's responses."""
        return sorted(self.seconds)[len(self.seconds) // 2] if self.seconds else 0.0

    def problem(self, config: Config) -> str | None:
        """Return why the run would stop; None if it would not: a few rows are masked and counted.

        A step in which more than --max-failure-rate of the samples have no score ends a run, and a row's samples are
        all in one step.
        """
        others = f", others take {self.median_s:.2g} s" if self.seconds else ""
        is_past_limit = self.trial_s >= config.reward.response_timeout_s
        hangs = self.hung if is_past_limit or (self.seconds and self.median_s < _FAST_S) else []
        why = self.failed | dict.fromkeys(hangs, f"no score within {self.trial_s:g} s{others}")
        per_step, rate = config.prompts_per_step, config.run.max_failure_rate
        if not why or min(len(why), per_step) / per_step <= rate:
            return None
        uid, detail = next(iter(why.items()))
        return (
            f"--reward-type {config.reward.reward_type}: {len(why)} of {self.num_tried} rows have no score, the first "
            f"is {uid}: {detail}; a step has {per_step} prompts, and --max-failure-rate {rate:g} stops the run; "
            "correct the reward or these rows"
        )

    def warnings(self) -> Iterator[str]:
        """Yield what does not stop the run."""
        for what, found in (("none of their responses", self.failed), ("some of their responses", self.partly)):
            if found:
                uid, detail = next(iter(found.items()))
                yield f"{len(found)} rows have no score for {what}, the first is {uid}: {detail}"
        if self.hung:
            yield f"{len(self.hung)} rows took longer than {self.trial_s:g} s, the first is {self.hung[0]}"

    def finding(self, config: Config) -> str:
        """Return the timing in one line."""
        if not self.seconds:
            return "no row was scored"
        responses = config.prompts_per_step * config.sampling.num_generations
        workers = config.reward.reward_workers * config.num_producers
        step_s = sum(self.seconds) / len(self.seconds) / 2 * responses / workers
        return (
            f"{self.num_tried} of {self.num_rows} rows, {self.median_s * 1e3:.3g} ms a row, the slowest "
            f"{max(self.seconds):.2g} s ({self.slowest}); about {step_s:.2g} s of rewards a step"
        )


def try_rows(prepared: "Prepared", *, limit_s: float) -> TriedRows | None:
    """Score rows for at most `limit_s` seconds; None if a model, or the environment, gives all rewards."""
    config = prepared.config
    names = {
        task: [part.name for part in parse_reward_type(each.reward.reward_type)]
        for task, each in config.by_task.items()
    }
    is_tried = {
        task: not any(is_model(name) or name in (ENVIRONMENT_REWARD, NO_REWARD) for name in parts)
        for task, parts in names.items()
    }
    prompts = [prompt for prompt in _prompts(prepared) if is_tried[prompt.task]]
    if not prompts or config.reward_models.names:
        return None
    urls = [name for parts in names.values() for name in parts if is_url(name)]
    for url in urls:
        _check_reachable(url)
    if urls or config.reward.code_verifier_api_url:
        prompts = prompts[:_MAX_OF_SERVICE]
    timeout_s = min(config.reward.response_timeout_s, _TRIAL_S)
    changed = config.with_changes(reward_timeout_s=timeout_s, reward_workers=_WORKERS)
    found = TriedRows(num_rows=len(prompts), trial_s=timeout_s)
    with closing(scorer_factory(changed)()) as scorer:
        deadline = time.monotonic() + limit_s
        waiting: deque[tuple[Prompt, float, Future[list[Score]]]] = deque()
        for prompt, responses in _asked(config, prompts):
            if time.monotonic() > deadline:
                break
            waiting.append((prompt, time.monotonic(), scorer.submit(responses, prompt.problem)))
            if len(waiting) >= _WORKERS:
                _collect(found, *waiting.popleft(), deadline)
        while waiting:
            _collect(found, *waiting.popleft(), deadline)
    return found


def _check_reachable(url: str) -> None:
    """Raise RunError if nothing listens at a served reward's address: its client would try again for a minute."""
    parts = urlsplit(url)
    if getproxies().get(parts.scheme) and not proxy_bypass(parts.hostname or ""):
        return
    place = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
    try:
        with socket.create_connection(place, _CONNECT_S):
            return
    except OSError as error:
        shown = public_reward_type(url)
        raise RunError(
            f"--reward-type {shown}: nothing answers at {place[0]}:{place[1]} ({error}); start the service, or correct "
            "the address"
        ) from error


def _prompts(prepared: "Prepared") -> Sequence[Prompt]:
    """Return the training prompts, or the first ones of a generator, and those of evaluations."""
    train = prepared.read_prompts
    if not train and prepared.source is not None:
        train = prepared.source.first(_MAX_OF_SERVICE)
    return [*train, *(prompt for each in prepared.evaluation.values() for prompt in each.prompts)]


def _asked(config: Config, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, Sequence[str]]]:
    """Yield each prompt with the responses that are scored."""
    by_length = sorted(range(len(prompts)), key=lambda number: -len(prompts[number].token_ids))
    others = [*range(len(prompts))]
    random.Random(config.run.seed).shuffle(others)
    first = dict.fromkeys((*range(min(_NUM_FIRST, len(prompts))), *by_length[:_NUM_LONGEST]))
    long = (_LONG * _MAX_LONG)[: min(_MAX_LONG, 4 * config.max_response_tokens)]
    specs = {task: reward_spec(each.reward) for task, each in config.by_task.items()}
    for number in dict.fromkeys((*first, *others)):
        prompt = prompts[number]
        answers = answers_for(specs[prompt.task], prompt.ground_truth)[-1:]
        yield prompt, (*answers, "", *([long] if number in first else []))


def _collect(found: TriedRows, prompt: Prompt, begin: float, future: "Future[list[Score]]", deadline: float) -> None:
    """Wait for a row's scores, at most until the deadline and a trial's time after it, and count them."""
    found.num_tried += 1
    try:
        scores = future.result(max(found.trial_s, deadline - time.monotonic()))
    except FutureTimeoutError:
        found.hung.append(prompt.uid)
        return
    seconds = time.monotonic() - begin
    invalid = [score.detail for score in scores if score.verdict == "invalid"]
    if any(detail.startswith(_TIMED_OUT) for detail in invalid):
        found.hung.append(prompt.uid)
        return
    if len(invalid) == len(scores):
        found.failed[prompt.uid] = shorten(invalid[0])
    elif invalid:
        found.partly[prompt.uid] = shorten(invalid[0])
    if seconds >= max(found.seconds, default=0.0):
        found.slowest = prompt.uid
    found.seconds.append(seconds)
