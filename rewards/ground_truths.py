"""Count the ground truths that the math rewards cannot read, before a run starts.

Only a response with the same text is right there; all others are invalid, and masked. Plain numbers can be read. The
others are given to the processes that score, with an empty response, which is wrong for a ground truth that can be read
and invalid for one that cannot.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from time import monotonic

from coati_rl.config.reward import RewardConfig
from coati_rl.reward_spec import RewardSpec
from coati_rl.text import shorten
from coati_rl.types import Problem, Prompt, Score
from rewards.math.math_answer import is_plain_number
from rewards.workers.pool import RewardPool

MAX_TEXTS = 2000  # that are read of a dataset, evenly spaced; 3 ms each
TIME_LIMIT_S = 60.0


def ground_truth_warnings(config: RewardConfig, datasets: Mapping[str, Sequence[Prompt]]) -> Iterator[str]:
    """Say how many rows of each dataset have a ground truth that cannot be read, and which is the first.

    Args:
        datasets: prompts by the name of their dataset, for people.
    """
    rows = {name: [prompt for prompt in prompts if not _is_plain(prompt)] for name, prompts in datasets.items()}
    if not config.scores_math or not any(rows.values()):
        return
    spec = RewardSpec(reward_type="boxed")
    with RewardPool(spec, num_workers=config.reward_workers, timeout_s=config.response_timeout_s) as pool:
        for name, prompts in rows.items():
            texts = [*dict.fromkeys(prompt.ground_truth for prompt in prompts)]
            unreadable, num_read = _unreadable(pool, texts[:: max(1, -(-len(texts) // MAX_TEXTS))])
            found = [prompt for prompt in prompts if prompt.ground_truth in unreadable]
            if found:
                read = "" if num_read == len(texts) else f", of {num_read} of {len(texts)} that were looked at"
                yield (
                    f"{name}: {len(found)} of {len(datasets[name])} ground truths cannot be read by the math reward"
                    f"{read} (the first is {found[0].uid}: {shorten(found[0].ground_truth)}); there only the same text "
                    "is right, and all other responses are invalid and masked"
                )


def _is_plain(prompt: Prompt) -> bool:
    return is_plain_number(prompt.ground_truth)


def _unreadable(pool: RewardPool, texts: Sequence[str]) -> tuple[set[str], int]:
    """Those of `texts` that cannot be read, and how many were looked at within the time limit."""
    deadline = monotonic() + TIME_LIMIT_S
    futures: list[Future[list[Score]]] = [pool.submit([""], Problem(ground_truth=text)) for text in texts]
    unreadable: set[str] = set()
    for number, (text, future) in enumerate(zip(texts, futures, strict=True)):
        try:
            (score,) = future.result(max(0.0, deadline - monotonic()))
        except TimeoutError:
            return unreadable, number
        if score.verdict == "invalid":
            unreadable.add(text)
    return unreadable, len(texts)
