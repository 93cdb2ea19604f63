"""Make the samples of a critic's training: recorded trajectories, with the return of each token in the loss.

A return is the discounted sum of a token's reward and those of the later tokens in the loss, over the whole trajectory:
what --max-length cuts off still counts in the returns of what is left. P tokens of a prompt, N in the loss.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coati_rl.algorithms.gae import generalised_advantages
from coati_rl.errors import ConfigError
from coati_rl.reading.forms import Form, Recorded
from coati_rl.reading.offline_samples import OfflineSamples
from coati_rl.samples import Sample

_NUM_DECODED = 16  # trajectories, evenly spaced


def value_samples(forms: Sequence[Form], tokenizer: Any, *, max_length: int, discount: float) -> OfflineSamples:
    """Return a sample of each trajectory that has loss tokens; longer ones are cut at their end.

    Args:
        forms: Recorded each.
        tokenizer: of the critic.
        max_length: tokens of a sample.
        discount: gamma, 0 to 1.
    Raises: ConfigError if the tokens are not this tokenizer's.
    """
    recorded = [form for form in forms if isinstance(form, Recorded)]
    _check_tokenizer(recorded, tokenizer)
    samples, rows, num_cut = list[Sample](), list[int](), 0
    for number, form in enumerate(recorded):
        num_own = max(0, max_length - len(form.prompt_ids))
        mask = form.loss_mask[:num_own]
        if not mask.any():
            continue
        rows.append(number)
        num_cut += num_own < len(form.token_ids)
        returns = token_returns(form.rewards, discount=discount)
        samples.append(
            Sample(
                uid=f"row-{number}",
                number=0,
                prefix_ids=form.prompt_ids,
                token_ids=form.token_ids[:num_own],
                loss_mask=mask,
                arrays={"loss_weights": 1.0, "temperature": 1.0, "returns": returns[: np.count_nonzero(mask)]},
            )
        )
    return OfflineSamples(
        samples=tuple(samples), rows=tuple(rows), num_cut=num_cut, num_left_out=len(recorded) - len(rows)
    )


def token_returns(rewards: np.ndarray, *, discount: float) -> np.ndarray:
    """Return float32[N], G_t = sum over s >= t of discount^(s - t) * r_s, of float32[N] rewards.

    It is what a critic learns with lambda 1 of an answer that ended, whatever its values.
    """
    values = np.zeros(len(rewards))
    found = generalised_advantages(rewards.astype(np.float64), values, discount=discount, trace=1.0)
    return found.astype(np.float32)


def _check_tokenizer(forms: Sequence[Recorded], tokenizer: Any) -> None:
    """Raise ConfigError if most responses are other text in this tokenizer than in the run's."""
    some = [form for form in forms if form.response.strip()]
    some = some[:: max(1, len(some) // _NUM_DECODED)]
    texts = [tokenizer.decode(form.token_ids[form.last_turn].tolist(), skip_special_tokens=True) for form in some]
    other = [form for form, text in zip(some, texts, strict=True) if text.strip() != form.response.strip()]
    if 2 * len(other) > len(some):
        raise ConfigError(
            f"{other[0].where}: in the tokenizer of --model its token_ids are other text than its response, and values "
            "are of the tokens that were sampled; use the model that sampled them, or one with its tokenizer"
        )
