"""Identify a dataset and the order in which its prompts are drawn, so that a run is resumed on the same prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import xxhash

from coati_rl.types import DEFAULT_TASK, Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawOrder:
    """Describe what decides the order of draws; a position is valid only for the same one."""

    seed: int
    num_prompts: int | None  # of a dataset; None: the source is endless
    fingerprint: str  # of the tokenised prompts
    ground_truths: str  # their digest, which does not affect draws, but a change is reported; "": an older checkpoint


def ground_truth_digest(prompts: Sequence[Prompt]) -> str:
    """Return a digest of the prompts' ground truths, in order."""
    hasher = xxhash.xxh3_128()
    for prompt in prompts:
        hasher.update(f"{len(prompt.ground_truth)}:{prompt.ground_truth}".encode(errors="surrogatepass"))
    return str(hasher.hexdigest())


def fingerprint(prompts: Sequence[Prompt], shares: Sequence[Fraction] = ()) -> str:
    """Return a digest of uids, tasks and token ids, in order, and of shares; corrected answers do not change it."""
    hasher = xxhash.xxh3_128()
    if shares:
        hasher.update(",".join(str(share) for share in shares).encode())
    for prompt in prompts:
        hasher.update(f"{prompt.uid}:{len(prompt.token_ids)}:".encode())
        if prompt.task != DEFAULT_TASK:
            hasher.update(f"{prompt.task}:".encode())
        hasher.update(np.asarray(prompt.token_ids, dtype="<i8").tobytes())
    return str(hasher.hexdigest())
