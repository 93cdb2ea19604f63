"""Compute the soft over-length penalty of a response."""


def over_length_penalty(length: int, *, max_length: int, cache_length: int, scale: float = 1.0) -> float:
    """Return 0 up to L_max - L_cache, falling linearly to -1 at L_max, and -1 beyond; times the scale.

    Args:
        length: tokens of the response.
        max_length: L_max, tokens that a response may have.
        cache_length: L_cache, tokens over which the penalty grows, in [1, L_max].
        scale: the full penalty, usually the reward of a right answer.
    Returns: in [-scale, 0], in units of reward.
    Raises: ValueError if a length is out of range.
    Source: arXiv:2503.14476 eq. 13.
    """
    if length < 0 or not 1 <= cache_length <= max_length:
        raise ValueError(f"length {length}, max_length {max_length}, cache_length {cache_length}: out of range")
    excess = length - (max_length - cache_length)
    return -scale * min(max(excess, 0), cache_length) / cache_length
