"""Open what scores responses, from a RewardSpec: scoring processes, reward models, or both.

Neither torch nor Ray is imported unless a reward model is used.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from coati_rl.reward_spec import RewardSpec, is_model, model_directory, parse_reward_type, short_names
from rewards.combined_scorer import CombinedScorer
from rewards.model.judgement import ModelClient
from rewards.model.model_checks import check_reward_model
from rewards.model.model_scorer import ModelScorer, open_local_model
from rewards.registry import make_reward, own_names
from rewards.weighted import Combination, load_combine
from rewards.workers.pool import RewardPool

if TYPE_CHECKING:  # it imports torch
    from coati_rl.protocols import GroupScorer

Factory = Callable[[], "GroupScorer"]


def check_scorer(spec: RewardSpec) -> None:
    """Raise ConfigError for a reward that cannot be made; the message contains the remedy."""
    if has_model(spec):
        model_factory(spec, num_workers=1, group_size=1, actors={})
    else:
        make_reward(spec)


def open_scorer(spec: RewardSpec, *, num_workers: int) -> "GroupScorer":
    """Start the processes that score single responses; a reward model is loaded in this process.

    Raises: ConfigError as `check_scorer`.
    """
    if has_model(spec):
        return model_factory(spec, num_workers=num_workers, group_size=1, actors={})()
    return RewardPool(spec, num_workers=num_workers, timeout_s=spec.timeout_s)


def has_model(spec: RewardSpec) -> bool:
    """Return True if a part of the reward is a model that is loaded by its directory."""
    return any(is_model(part.name) for part in parse_reward_type(spec.reward_type))


def pool_factory(spec: RewardSpec, *, num_workers: int, group_size: int) -> Factory:
    """Return the factory of scoring processes for groups of this size."""
    timeout_s = spec.timeout_s
    if make_reward(spec).is_batch:  # the responses of a group share the time of all, and parts come one after another
        spec = replace(spec, group_timeout_s=timeout_s * group_size)
        timeout_s *= group_size * len(parse_reward_type(spec.reward_type))
    return functools.partial(RewardPool, spec, num_workers=num_workers, timeout_s=timeout_s)


def model_factory(
    spec: RewardSpec, *, num_workers: int, group_size: int, actors: Mapping[str, Sequence[str]]
) -> Factory:
    """Return the factory of a reward with at least one model; its other parts have scoring processes each."""
    parts = parse_reward_type(spec.reward_type)
    names = short_names(parts)
    load_combine(spec.combine, names, own_names=lambda: own_names(spec.reward_type))
    factories: list[Factory] = []
    for part in parts:
        if is_model(part.name):
            directory = str(model_directory(part.name))
            check_reward_model(model_directory(part.name))
            factories.append(functools.partial(_model_scorer, directory, actors.get(directory, ()), spec.correct_from))
        else:
            alone = replace(spec, reward_type=part.name, combine=None)
            factories.append(pool_factory(alone, num_workers=num_workers, group_size=group_size))
    if len(parts) == 1 and parts[0].weight == 1 and spec.combine is None:
        return factories[0]
    weights = {name: part.weight for name, part in zip(names, parts, strict=True)}
    return functools.partial(_combined, factories, weights, spec)


def _model_scorer(directory: str, actors: Sequence[str], correct_from: float) -> "GroupScorer":
    client: ModelClient
    if actors:
        from rewards.model.actor import RewardModelActors  # `python -m rewards` does without Ray

        client = RewardModelActors.find(actors)
    else:
        client = open_local_model(model_directory(directory))
    return ModelScorer(client, correct_from=correct_from)


def _combined(factories: Sequence[Factory], weights: Mapping[str, float], spec: RewardSpec) -> "GroupScorer":
    function = load_combine(spec.combine, [*weights], own_names=lambda: own_names(spec.reward_type))
    scorers: list[GroupScorer] = []
    try:
        for factory in factories:
            scorers.append(factory())
    except BaseException:
        for scorer in scorers:
            scorer.close()
        raise
    return CombinedScorer(scorers, Combination(weights, function))
