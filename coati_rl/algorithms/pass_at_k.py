"""Estimate from n samples of a problem, c of them correct, the probability that k samples hold a correct one."""

import math
from collections.abc import Sequence


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k of one problem: 1 - C(n - c, k) / C(n, k).

    Args:
        num_samples: n, drawn independently.
        num_correct: c of them.
        k: samples of which one has to be correct.
    Returns: in [0, 1]; c / n for k = 1.
    Raises: ValueError unless 0 <= c <= n and 1 <= k <= n.
    Source: arXiv:2107.03374 eq. 1.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"n = {num_samples}, c = {num_correct}, k = {k}: need 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def ks_of(num_samples: int) -> list[int]:
    """Return the k for which n samples are reported: the powers of two up to n, and n."""
    return sorted({*(2**power for power in range(num_samples.bit_length())), num_samples})


def sampled_accuracy(num_correct: Sequence[int], num_samples: int) -> dict[str, float]:
    """Return avg@n and pass@k over problems, by the names under which they are reported.

    Args:
        num_correct: correct samples of each problem; at least one problem.
        num_samples: n, of every problem.
    Returns: {"avg@n": mean share of correct samples, "pass@1": ..., "pass@2": ..., ..., "pass@n": ...}.
    """
    num_problems = len(num_correct)
    figures = {f"avg@{num_samples}": sum(num_correct) / (num_problems * num_samples)}
    for k in ks_of(num_samples):
        figures[f"pass@{k}"] = sum(pass_at_k(num_samples, each, k) for each in num_correct) / num_problems
    return figures
