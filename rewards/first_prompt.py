"""Show in a dry run the first prompt as the policy reads it, and what its reward gives for the right answer.

A math reward that gives the ground truth no 1, or a function that raises, is seen before anything starts. Rewards that
run programs, compute a model, or ask a server are not tried.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing

from coati_rl.config import Config
from coati_rl.config.reward import reward_spec
from coati_rl.reward_spec import MATH_REWARDS, RewardSpec, is_own, parse_reward_type
from coati_rl.text import shorten
from coati_rl.types import Prompt, Score
from rewards.scoring import pool_factory

_MAX_SHOWN = 400  # characters of the prompt: those of its beginning and its end
_WRITTEN = {"boxed": "\\boxed{{{}}}", "think_answer_tags": "<think></think><answer>{}</answer>"}


def first_prompt_lines(config: Config, prompts: Sequence[Prompt], *, is_scored: bool = True) -> Iterator[str]:
    """Yield lines of the plan; none without prompts, as where the model is not on this machine.

    Args:
        config: of the run.
        prompts: of training, or of batch inference.
        is_scored: False: of the prompt alone.
    """
    if not prompts:
        return
    first = prompts[0]
    yield f"{'first prompt':<24}{shown(first.rendered or first.text)}"
    spec = reward_spec(config.by_task[first.task].reward)
    if is_scored and is_tried(spec):
        asked = (*answers_for(spec, first.ground_truth), "")
        with closing(pool_factory(spec, num_workers=1, group_size=len(asked))()) as scorer:
            scores = scorer.submit(asked, first.problem).result()
        parts = [
            f"{outcome(score)} for {shorten(text) or 'an empty response'}"
            for score, text in zip(scores, asked, strict=True)
        ]
        yield f"{'its reward':<24}{', '.join(parts)}"


def shown(text: str) -> str:
    """Return a text as JSON writes it, a long one without its middle."""
    left_out = len(text) - _MAX_SHOWN
    if left_out > 0:
        half = _MAX_SHOWN // 2
        text = f"{text[:half]} ... {text[-half:]}"
    more = f" ({left_out} characters left out)" if left_out > 0 else ""
    return json.dumps(text, ensure_ascii=False) + more


def is_tried(spec: RewardSpec) -> bool:
    """Return True if all parts of a reward are comparisons of math answers or functions of the user."""
    return all(part.name in MATH_REWARDS or is_own(part.name) for part in parse_reward_type(spec.reward_type))


def answers_for(spec: RewardSpec, ground_truth: str) -> tuple[str, ...]:
    """Return responses that hold the ground truth in the form that the reward asks for; none without one.

    A function of the user may ask for any form: the plain text and the box are tried.
    """
    if not ground_truth:
        return ()
    names = [part.name for part in parse_reward_type(spec.reward_type)]
    if not set(names) & set(MATH_REWARDS):
        return ground_truth, _WRITTEN["boxed"].format(ground_truth)
    answer = ground_truth
    for name in ("boxed", "think_answer_tags"):  # the box inside of the tags, where a reward of each kind is asked
        if name in names:
            answer = _WRITTEN[name].format(answer)
    return (answer,)


def outcome(score: Score) -> str:
    """Return a reward, or why there is none."""
    return f"invalid ({shorten(score.detail)})" if score.verdict == "invalid" else f"{score.reward:g}"
