"""Check what a run has recorded of a step's rollouts: lines, prompts, texts, rewards, advantages, log-probabilities."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from coati_rl.batch import MicroBatch
from coati_rl.batching.batcher import ClosedStep
from coati_rl.batching.packing import probe_micro_batch
from coati_rl.config import Config
from coati_rl.errors import CoatiError
from coati_rl.observability.records import shown_truth
from coati_rl.replay.forward import token_scores
from coati_rl.replay.parts import ReplayModel
from coati_rl.replay.stage import ReplayStage, checked, unchecked
from coati_rl.reward_spec import ENVIRONMENT_REWARD
from coati_rl.run_reader.rollout import RecordedRollout
from coati_rl.text import count, shorten
from coati_rl.types import Prompt, RolloutGroup, Score

SCORE_TIMEOUT_S = 600.0  # of one group; each response has the run's own limit
MAX_GAP = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (5e-2, 1.0)}  # mean and largest, nats


def check_records(rollouts: Sequence[RecordedRollout], record: Mapping[str, Any]) -> ReplayStage:
    """Compare the lines of a step with each other and with the step's counts in metrics.jsonl."""
    problem, seen = None, set[tuple[str, int]]()
    for each in rollouts:
        mask = each.line.get("loss_mask", [[True, len(each.line["token_ids"])]])
        counted = sum(length for is_counted, length in mask if is_counted)
        if (each.uid, each.sample) in seen:
            problem = problem or f"{_named(each)} is recorded twice"
        lengths = {
            "token_ids": len(each.line["token_ids"]),
            "rollout_logprobs": len(each.line["rollout_logprobs"]),
            "token_versions": sum(length for _, length in each.line["token_versions"]),
            "loss_mask": sum(length for _, length in mask),
        }
        if len({*lengths.values()}) > 1:
            of_each = ", ".join(f"{name} of {length}" for name, length in lengths.items())
            problem = problem or f"{_named(each)}: {of_each}"
        if counted != each.num_tokens:
            problem = problem or f"{_named(each)}: num_tokens is {each.num_tokens}, and its loss mask counts {counted}"
        seen.add((each.uid, each.sample))
    counts = {
        "samples_in_loss": len({(each.uid, each.episode) for each in rollouts if each.is_trained}),
        "num_response_tokens": sum(each.num_tokens for each in rollouts),
    }
    for name, found in counts.items():
        recorded = record.get(name)
        if recorded is not None and recorded != found:
            problem = problem or f"metrics.jsonl has {name} {recorded}, the rollouts have {found}"
    prompts = count(len({each.uid for each in rollouts}), "prompt")
    figures = f"{count(len(rollouts), 'rollout')} of {prompts}, {count(counts['num_response_tokens'], 'token')}"
    return checked("records", problem, figures)


def check_prompts(rollouts: Sequence[RecordedRollout], prompts: Mapping[str, Prompt]) -> ReplayStage:
    """Compare recorded prompts with what the data's rows, template and tokenizer give. `prompts`: by uid."""
    problem, num_tokens = None, 0
    for each in rollouts:
        found = prompts.get(each.uid)
        if found is None:
            problem = problem or f"{each.uid}: the dataset has no such row that fits --max-prompt-tokens"
            continue
        num_tokens += len(found.token_ids)
        if shown_truth(found.ground_truth) != each.truth:
            truth, recorded = shorten(shown_truth(found.ground_truth), 60), shorten(each.truth, 60)
            problem = problem or f"{each.uid}: the row's ground truth is {truth!r}, recorded is {recorded!r}"
        if each.messages or "text" in each.line or "parent_sample" in each.line:
            continue  # an environment goes on from the prompt as it likes
        tokens = tuple(each.line["prompt_token_ids"])
        if tokens != found.token_ids:
            at = next((n for n, pair in enumerate(zip(tokens, found.token_ids, strict=False)) if len({*pair}) > 1), -1)
            at = min(len(tokens), len(found.token_ids)) if at < 0 else at
            problem = problem or (
                f"{_named(each)}: its prompt differs from token {at} on: recorded {_from(tokens, at)}, "
                f"row and template give {_from(found.token_ids, at)}"
            )
    return checked("prompt", problem, f"{count(num_tokens, 'token')} of rows and template")


def check_texts(rollouts: Sequence[RecordedRollout], tokenizer: Any, stop: Sequence[str]) -> ReplayStage:
    """Compare each recorded answer with its tokens, decoded."""
    problem = None
    for each in rollouts:
        turns = each.line["turns"]
        tokens = each.line["token_ids"][turns[-1][0] : turns[-1][1]]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        ends = [text.index(mark) + len(mark) for mark in stop if mark in text]
        text = text[: min(ends)] if ends else text
        is_same = _printed(text) == _printed(each.response)
        if not is_same:
            problem = problem or (
                f"{_named(each)}: its last turn's {count(len(tokens), 'token')} decode to {shorten(text, 60)!r}, "
                f"recorded is {shorten(each.response, 60)!r}"
            )
    return checked("text", problem, f"{count(len(rollouts), 'answer')} are their tokens, decoded")


def check_rewards(
    rollouts: Sequence[RecordedRollout], prompts: Mapping[str, Prompt], config: Config, scorer: Any
) -> ReplayStage:
    """Score the answers again by the run's reward, and compare."""
    problem, num_scored, num_left = None, 0, 0
    for uid, lines in groupby(rollouts, key=lambda each: each.uid):
        prompt = prompts.get(uid)
        answers = [*{each.episode: each for each in lines}.values()]  # the last trajectory of each episode
        task = answers[0].line.get("task", "default")
        if prompt is None or config.of_task(task).reward.reward_type == ENVIRONMENT_REWARD:
            num_left += len(answers)
            continue
        future: Future[list[Score]] = scorer.submit([each.response for each in answers], prompt.problem)
        for each, score in zip(answers, future.result(timeout=SCORE_TIMEOUT_S), strict=True):
            num_scored += 1
            problem = problem or _reward_problem(each, score)
    if problem is None and not num_scored:
        return unchecked("reward", f"{count(num_left, 'answer')} got rewards of their environment while it ran")
    left = f"; {num_left} got theirs of their environment" if num_left else ""
    return checked("reward", problem, f"{count(num_scored, 'answer')} scored again{left}")


def _reward_problem(rollout: RecordedRollout, score: Score) -> str | None:
    recorded = (rollout.reward, rollout.line["answer_correct"], rollout.verdict)
    reward = score.reward if math.isfinite(score.reward) else None
    found = (reward, score.answer_correct, score.verdict)
    if recorded[2] == found[2] == "invalid":
        return None
    if recorded == found:
        return None
    return f"{_named(rollout)}: recorded {_verdict(*recorded)}, scored again {_verdict(*found)}"


def check_advantages(rollouts: Sequence[RecordedRollout], closed: ClosedStep) -> ReplayStage:
    """Compare recorded advantages with those of the recorded rewards."""
    problem, num = None, 0
    for each in rollouts:
        found, recorded = closed.advantages.get((each.uid, each.sample)), each.advantage
        if (found is None) != (recorded is None):
            what = ("in the loss", "not in the loss")
            problem = (
                problem or f"{_named(each)}: recorded {what[recorded is None]}, by the rules {what[found is None]}"
            )
        elif found is not None and recorded is not None:
            num += 1
            if not math.isclose(found, recorded, rel_tol=1e-9, abs_tol=1e-12):
                problem = problem or f"{_named(each)}: recorded {recorded:.9g}, of the rewards {found:.9g}"
    return checked("advantage", problem, f"{count(num, 'sample')} in the loss")


def check_rollout_logprobs(
    groups: Sequence[RolloutGroup], models: Mapping[int, ReplayModel], config: Config, precision: torch.dtype
) -> ReplayStage:
    """Compare the engine's log-probabilities with those of the policy that sampled the tokens.

    Args:
        groups: of the step.
        models: policies by version, as far as the run has kept them.
        config: of the run.
        precision: of the run.
    """
    name = "rollout logprobs"
    if config.sampling.backend == "fake":
        return unchecked(name, "--backend fake samples from no model")
    if config.renormalises:
        return unchecked(name, "engines renormalise under top-k, top-p or min-p")
    gaps, where, num_other = list[float](), list[str](), 0
    with torch.no_grad():
        for group in groups:
            for number, trajectory in enumerate(group.trajectories):
                versions = trajectory.policy_versions
                for version, model in models.items():
                    if not (versions == version).any():
                        continue
                    scores = token_scores(model, _of_trajectory(trajectory))[0][0].numpy()
                    for at in np.flatnonzero(versions == version).tolist():
                        gaps.append(abs(float(scores[at]) - float(trajectory.logprobs[at])))
                        where.append(f"{group.prompt.uid} sample {number}, token {at}, version {version}")
                num_other += int(np.count_nonzero(~np.isin(versions, [*models])))
    if not gaps:
        return unchecked(name, f"weights of no version that sampled the {count(num_other, 'token')} are kept")
    mean, largest = float(np.mean(gaps)), int(np.argmax(np.nan_to_num(gaps, nan=np.inf)))
    most = MAX_GAP[precision]
    figures = f"gap to the policy that sampled: mean {mean:.2g}, largest {gaps[largest]:.2g} nats ({where[largest]})"
    left = f"; {count(num_other, 'token')} of versions that are not kept" if num_other else ""
    is_close = mean <= most[0] and gaps[largest] <= most[1]
    return checked(name, None if is_close else figures, f"{count(len(gaps), 'token')}, {figures}{left}")


def _of_trajectory(trajectory: Any) -> MicroBatch:
    """Return one row that scores a trajectory's loss tokens at their temperatures."""
    micro_batch = probe_micro_batch(trajectory.token_ids.tolist())
    mask = trajectory.loss_mask[1:]  # of the tokens that a probe scores: all after the first
    kept = {name: array[:, mask] for name, array in micro_batch.loss_arrays.items()}
    return replace(micro_batch, loss_arrays={**kept, "temperature": trajectory.temperature[None].astype(np.float32)})


def prompts_or_error(find: Any, rollouts: Sequence[RecordedRollout]) -> dict[str, Prompt]:
    """Return the prompts of a step by uid; those that the data does not have are left out."""
    found = dict[str, Prompt]()
    for uid in dict.fromkeys(each.uid for each in rollouts):
        try:
            found[uid] = find(uid)
        except (KeyError, IndexError, ValueError, CoatiError):
            continue
    return found


def _named(rollout: RecordedRollout) -> str:
    return f"{rollout.uid} sample {rollout.sample}"


def _verdict(reward: float | None, is_correct: bool, verdict: str) -> str:
    number = "none" if reward is None else f"{reward:g}"
    return f"reward {number} ({verdict}{', correct' if is_correct else ''})"


def _from(tokens: Sequence[int], at: int) -> str:
    return "nothing" if at >= len(tokens) else str([*tokens[at : at + 4]])


def _printed(text: str) -> str:
    """Return text as a line of JSON has it."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
