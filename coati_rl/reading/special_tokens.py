"""Find the tokens that a tokenizer treats as special, with a name of their own (eos, pad) or without one."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def is_special(tokenizer: Any, token_id: int) -> bool:
    """Return True for a token that decoding leaves out where special tokens are skipped, as the tokenizer's file says.

    `all_special_ids` holds only those that have a name; Gemma 3's <end_of_turn> has none.
    """
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    return bool(text) and not tokenizer.decode([token_id], skip_special_tokens=True)


def length_of_turn(token_ids: np.ndarray | Sequence[int], tokenizer: Any) -> int:
    """Count the tokens of a turn up to the special one that ends it; all of them if none does.

    After it there is only white space of the template, which is not sampled. A token with a name ends the turn whatever
    follows; one without a name, which a message may quote, only if nothing but white space does.
    """
    named = np.flatnonzero(np.isin(np.asarray(token_ids, dtype=np.int64), tokenizer.all_special_ids))
    last_named = int(named[-1]) + 1 if len(named) else 0
    for length in range(len(token_ids), last_named, -1):
        token_id = int(token_ids[length - 1])
        if is_special(tokenizer, token_id):
            return length
        if tokenizer.decode([token_id], skip_special_tokens=False).strip():
            break
    return last_named or len(token_ids)
