"""Count the ground truths that the math rewards cannot read, before a run starts.

With such a ground truth only a response with the same text is correct; all others are invalid, and masked. Plain
numbers can always be read. All other ground truths are scored by the worker processes with an empty response, whose
verdict is "wrong" if the ground truth can be read and "invalid" if not.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from time import monotonic

from coati_rl.config import Config
from coati_rl.reward_spec import RewardSpec
from coati_rl.text import shorten
from coati_rl.types import Problem, Prompt, Score
from rewards.math.math_answer import is_plain_number
from rewards.workers.pool import RewardPool

MAX_TEXTS = 2000  # ground truths checked per dataset, evenly spaced; 3 ms each
TIME_LIMIT_S = 60.0


def ground_truth_warnings(config: Config, datasets: Mapping[str, Sequence[Prompt]]) -> Iterator[str]:
    """Yield a warning for each dataset with unreadable ground truths: their number, and the first one.

    Args:
        config: of the run; the rows of tasks with a math reward are checked.
        datasets: prompts by the dataset's name, which is used in the messages.
    """
    reward, of_math = config.reward, {name for name, each in config.by_task.items() if each.reward.scores_math}
    datasets = {name: [each for each in prompts if each.task in of_math] for name, prompts in datasets.items()}
    rows = {name: [prompt for prompt in prompts if not _is_plain(prompt)] for name, prompts in datasets.items()}
    if not any(rows.values()):
        return
    spec = RewardSpec(reward_type="boxed")
    with RewardPool(spec, num_workers=reward.reward_workers, timeout_s=reward.response_timeout_s) as pool:
        for name, prompts in rows.items():
            texts = [*dict.fromkeys(prompt.ground_truth for prompt in prompts)]
            unreadable, num_read = _unreadable(pool, texts[:: max(1, -(-len(texts) // MAX_TEXTS))])
            found = [prompt for prompt in prompts if prompt.ground_truth in unreadable]
            if found:
                read = "" if num_read == len(texts) else f", {num_read} of {len(texts)} different texts were checked"
                yield (
                    f"{name}: {len(found)} of {len(datasets[name])} ground truths cannot be read by the math reward"
                    f"{read} (the first is {found[0].uid}: {shorten(found[0].ground_truth)}); for these rows only the "
                    "same text is correct, and all other responses are invalid and masked; correct or remove the rows"
                )


def _is_plain(prompt: Prompt) -> bool:
    return is_plain_number(prompt.ground_truth)


def _unreadable(pool: RewardPool, texts: Sequence[str]) -> tuple[set[str], int]:
    """Return the texts that cannot be read, and the number of texts that were checked within the time limit."""
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
