"""Make rollout groups of the lines that a run has written of them, the inverse of `RolloutRecorder`."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from coati_rl.batching.packed_group import as_packed
from coati_rl.errors import ConfigError
from coati_rl.routes import routes_of_json
from coati_rl.run_lengths import decode_runs
from coati_rl.run_reader.rollout import RecordedRollout
from coati_rl.types import (
    DEFAULT_TASK,
    Baseline,
    Prompt,
    RolloutGroup,
    Score,
    SharedPrefix,
    TokenReward,
    Trajectory,
    Turn,
)

_OF_TOKENS = ("prompt_token_ids", "token_ids", "rollout_logprobs", "token_versions", "turns")


def check_detail(rollouts: Sequence[RecordedRollout]) -> None:
    """Raise ConfigError for a rollout that was recorded without tokens."""
    for each in rollouts:
        if lacking := [name for name in _OF_TOKENS if name not in each.line]:
            raise ConfigError(
                f"prompt {each.uid} of step {each.step}: has no {', '.join(lacking)}; a step can be replayed of a run "
                "with --rollout-detail full"
            )


def groups_of(rollouts: Sequence[RecordedRollout]) -> list[RolloutGroup]:
    """Return the groups of a step, in the order of their lines: the step's own first, by mini-batch.

    Raises: ConfigError naming a prompt whose lines do not make a group.
    """
    found = []
    for uid, lines in groupby(rollouts, key=lambda each: each.uid):
        try:
            group = _group([*lines])
            as_packed(group)
        except (ValueError, IndexError, TypeError, KeyError) as error:
            raise ConfigError(f"prompt {uid}: its rollouts do not belong together: {error}") from error
        found.append(group)
    return found


def _group(rollouts: Sequence[RecordedRollout]) -> RolloutGroup:
    first = rollouts[0]
    prompt = Prompt(
        uid=first.uid,
        token_ids=tuple(first.line["prompt_token_ids"]),
        ground_truth=first.truth,
        task=first.line.get("task", DEFAULT_TASK),
        text=first.prompt,
    )
    trajectories = list[Trajectory]()
    num_turns = dict[int, int]()  # of an episode, so far
    for each in rollouts:
        trajectory = _trajectory(each, prompt, num_turns.get(each.episode, 0))
        num_turns[each.episode] = trajectory.turns[-1].index + 1
        trajectories.append(trajectory)
    # The lines of an episode have its score.
    scores = {each.episode: _score(each) for each in rollouts}
    return RolloutGroup(
        lease_id=0,
        producer_id=first.line["producer"],
        prompt=prompt,
        temperature=first.line["temperature"],
        trajectories=trajectories,
        scores=tuple(scores[episode] for episode in sorted(scores)),
        baseline=_baseline(first),
    )


def _trajectory(rollout: RecordedRollout, prompt: Prompt, first_turn: int) -> Trajectory:
    line = rollout.line
    start, num_own = len(line["prompt_token_ids"]), len(line["token_ids"])
    token_ids = np.array([*line["prompt_token_ids"], *line["token_ids"]], dtype=np.int32)
    mask = decode_runs(line.get("loss_mask", ((True, num_own),)), bool)
    logprobs = np.array(line["rollout_logprobs"], dtype=np.float32)  # null becomes NaN
    versions = decode_runs(line["token_versions"], np.int32)
    lengths = {"loss_mask": len(mask), "rollout_logprobs": len(logprobs), "token_versions": len(versions)}
    for name, length in lengths.items():
        if length != num_own:
            raise ValueError(f"sample {rollout.sample} has {num_own} token_ids and {name} of {length}")
    counted = int(np.count_nonzero(mask))
    temperatures = line.get("token_temperatures", ((line["temperature"], counted),))
    return Trajectory(
        token_ids=token_ids,
        loss_mask=np.concatenate([np.zeros(start, dtype=bool), mask]),
        logprobs=logprobs[mask],
        policy_versions=versions[mask],
        temperature=decode_runs(temperatures, np.float32),
        episode=rollout.episode,
        turns=tuple(
            Turn(index=first_turn + number, start=start + begin, end=start + end, finish_reason=reason)
            for number, (begin, end, reason) in enumerate(line["turns"])
        ),
        text=rollout.response,
        prefix=_prefix(line, token_ids[:start], prompt),
        rewards=tuple(
            TokenReward(position=start + place, name=name, value=value)
            for place, name, value in line.get("token_rewards", ())
        ),
        routes=routes_of_json(line["routes"]) if "routes" in line else None,
    )


def _prefix(line: Any, context: np.ndarray, prompt: Prompt) -> SharedPrefix:
    """Return the recorded prefix of a fork; else the tokens that the trajectory begins with as the group does."""
    if "parent_sample" in line:
        return SharedPrefix(num_tokens=line["num_shared_tokens"], parent=line["parent_sample"])
    shared = min(len(context), len(prompt.token_ids))
    differ = np.flatnonzero(context[:shared] != np.array(prompt.token_ids[:shared], dtype=np.int32))
    return SharedPrefix(num_tokens=int(differ[0]) if len(differ) else shared)


def _score(rollout: RecordedRollout) -> Score:
    line = rollout.line
    return Score(
        reward=float("nan") if rollout.reward is None else rollout.reward,
        answer_correct=line["answer_correct"],
        format_valid=line["format_valid"],
        verdict=line["verdict"],
        detail=rollout.detail,
        breakdown=dict(line.get("breakdown", {})),
        filter_score=line.get("filter_score"),
    )


def _baseline(rollout: RecordedRollout) -> Baseline | None:
    """Return the greedy answer's score; how long it was is not recorded."""
    if "baseline_reward" not in rollout.line:
        return None
    reward = rollout.line["baseline_reward"]
    is_known = reward is not None
    score = Score(
        reward=reward if is_known else 0.0,
        answer_correct=False,
        format_valid=True,
        verdict="ok" if is_known else "invalid",
    )
    return Baseline(score=score, num_tokens=0)
