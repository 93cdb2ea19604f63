"""Identify a dataset and the order in which its prompts are drawn, so that a run is resumed on the same prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from coati_rl.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawOrder:
    """Describe what decides which prompt a draw gives; a position means nothing under another one."""

    seed: int
    num_prompts: int | None  # of a dataset; None: the source is endless
    fingerprint: str  # of the prompts as they are tokenised
    ground_truths: str  # their digest, which decides no draw and is told of; "": a checkpoint from before it


def ground_truth_digest(prompts: Sequence[Prompt]) -> str:
    """Digest what the prompts are scored against, in order."""
    hasher = xxhash.xxh3_128()
    for prompt in prompts:
        hasher.update(f"{len(prompt.ground_truth)}:{prompt.ground_truth}".encode(errors="surrogatepass"))
    return str(hasher.hexdigest())


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A digest of uids and token ids, in order; answers may be corrected without changing it."""
    hasher = xxhash.xxh3_128()
    for prompt in prompts:
        hasher.update(f"{prompt.uid}:{len(prompt.token_ids)}:".encode())
        hasher.update(np.asarray(prompt.token_ids, dtype="<i8").tobytes())
    return str(hasher.hexdigest())
