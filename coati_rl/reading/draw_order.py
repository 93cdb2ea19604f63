"""Identify a dataset and the order in which its prompts are drawn, so that a run is resumed on the same prompts."""

from collections.abc import Iterable, Sequence
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


class PromptDigest:
    """Compute both digests of prompts that are added one by one, in order, and of shares.

    The fingerprint is of uids, tasks and token ids; corrected answers do not change it.
    """

    def __init__(self, shares: Sequence[Fraction] = ()) -> None:
        self._tokens, self._truths = xxhash.xxh3_128(), xxhash.xxh3_128()
        if shares:
            self._tokens.update(",".join(str(share) for share in shares).encode())

    def add(self, prompt: Prompt) -> None:
        """Add the next prompt."""
        self._truths.update(f"{len(prompt.ground_truth)}:{prompt.ground_truth}".encode(errors="surrogatepass"))
        self._tokens.update(f"{prompt.uid}:{len(prompt.token_ids)}:".encode())
        if prompt.task != DEFAULT_TASK:
            self._tokens.update(f"{prompt.task}:".encode())
        self._tokens.update(np.asarray(prompt.token_ids, dtype="<i8").tobytes())

    @property
    def fingerprint(self) -> str:
        """Return the digest of uids, tasks and token ids, and of shares."""
        return str(self._tokens.hexdigest())

    @property
    def ground_truths(self) -> str:
        """Return the digest of the ground truths."""
        return str(self._truths.hexdigest())


def digest_of(prompts: Iterable[Prompt], shares: Sequence[Fraction] = ()) -> PromptDigest:
    """Return the digests of prompts."""
    digest = PromptDigest(shares)
    for prompt in prompts:
        digest.add(prompt)
    return digest


def ground_truth_digest(prompts: Sequence[Prompt]) -> str:
    """Return a digest of the prompts' ground truths, in order."""
    return digest_of(prompts).ground_truths


def fingerprint(prompts: Sequence[Prompt], shares: Sequence[Fraction] = ()) -> str:
    """Return a digest of uids, tasks and token ids, in order, and of shares; corrected answers do not change it."""
    return digest_of(prompts, shares).fingerprint
