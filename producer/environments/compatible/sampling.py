"""Give agents of other systems the sampling of their turns, and read from what they hand on how the next is sampled.

What they leave as it was given is as the run's flags say.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coati_rl.types import CUTS
from producer.environments.episode import EpisodeFailure

# What cannot be sampled otherwise, with the values that change nothing, and what has no effect on tokens.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "guided_decoding": (),
    "structured_outputs": (),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0, 1),
    "min_new_tokens": (0, 1),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "ignore_eos": (False,),
    "logits_processors": ([],),
    "include_stop_str_in_output": (False,),
}
_FIELDS = ("temperature", *CUTS, "stop", "seed")
_WITHOUT_EFFECT = {
    "n", "max_tokens", "max_new_tokens", "logprobs", "prompt_logprobs", "detokenize", "output_kind",
    "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "do_sample", "return_logprob",
}  # fmt: skip
_ALL = (-1, 0)  # of top_k


@dataclass(slots=True)
class SamplingParams:
    """Stand in for vLLM's, which OpenRLHF's agents read and change."""

    temperature: float
    top_p: float
    top_k: int  # -1: all
    min_p: float
    max_tokens: int
    stop: list[str]
    seed: int | None = None
    n: int = 1
    min_tokens: int = 0
    logprobs: int | None = None  # recorded by the run, and not given to the agent
    skip_special_tokens: bool = True


def params_of(sampling: Mapping[str, Any]) -> SamplingParams:
    """Return the object that OpenRLHF's agents are given, of a task's `sampling`."""
    return SamplingParams(
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        top_k=-1 if sampling["top_k"] is None else sampling["top_k"],
        min_p=sampling["min_p"],
        max_tokens=sampling["max_new_tokens"],
        stop=[*sampling["stop"]],
    )


def fields_of(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dictionary that RL4LLM's environments are given, with the names of SGLang."""
    names = ("temperature", "top_p", "min_p", "max_new_tokens")
    return {
        **{name: sampling[name] for name in names},
        "top_k": -1 if sampling["top_k"] is None else sampling["top_k"],
        "stop": [*sampling["stop"]],
    }


def changes_of(params: Any, sampling: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what is sampled otherwise than the run's flags say.

    Args:
        params: vLLM's object, ours or a dictionary; a value that is None, or not there, changes nothing.
        sampling: of the task.
    Raises: EpisodeFailure for what cannot be sampled.
    """
    if params is None:
        return None
    names = {*_FIELDS, *_UNSUPPORTED, *_WITHOUT_EFFECT}
    if isinstance(params, Mapping):
        given = dict(params)
        if unknown := sorted(str(name) for name in set(given) - names if given[name] is not None):
            raise EpisodeFailure(f"sampling_params: {unknown[0]} is not supported; leave it out")
    else:
        given = {name: getattr(params, name, None) for name in names}
    for name, neutral in _UNSUPPORTED.items():
        if (value := given.get(name)) is not None and value not in neutral:
            raise EpisodeFailure(f"sampling_params: {name} {value!r} is not supported; leave it out")
    if given.get("n") not in (None, 1):
        raise EpisodeFailure(f"sampling_params: n={given['n']} answers to a turn; use 1, and -g for the group")
    changes = {name: given[name] for name in _FIELDS if given.get(name) is not None}
    if "top_k" in changes and changes["top_k"] in _ALL:
        changes["top_k"] = None
    if "stop" in changes:
        changes["stop"] = [changes["stop"]] if isinstance(changes["stop"], str) else [*changes["stop"]]
    most = [given[name] for name in ("max_tokens", "max_new_tokens") if given.get(name) is not None]
    if most and most[0] < sampling["max_new_tokens"]:  # -mnt holds, too
        changes["max_new_tokens"] = most[0]
    as_given = {**sampling, "seed": None, "stop": [*sampling["stop"]]}
    return {name: value for name, value in changes.items() if as_given[name] != value} or None
