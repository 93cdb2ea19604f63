"""The micro-batch contract: what the coordinator assembles and the loss consumes. Fixed early, costly to change.

A micro-batch is R rows of L tokens. A row holds one or more whole samples (prompt then response) one after another;
position_ids restart at 0 with each sample, which is how attention knows where one ends. All arrays are [R, L] and
speak of the token *at* that place: `logprobs[r, t]` is log pi(token t | tokens before it in its sample). The first
token of a sample has none, and its loss_mask is False.

A loss is the sum over tokens of loss_weights x term; the weights already hold the aggregation (token or sample level)
but not the global denominator: `MiniBatch.loss_scale` of the step's last mini-batch does, since only then it is known.
So neither rows, micro-batches, mini-batches nor ranks change the gradient.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One forward/backward of one data-parallel rank: R rows, L tokens each."""

    token_ids: np.ndarray  # int64[R, L], padded with 0
    position_ids: np.ndarray  # int64[R, L], restart at 0 with every sample; padding counts on from 0 as its own sample
    sample_index: np.ndarray  # int32[R, L], index of the sample in the rank's mini-batch, -1 on padding
    loss_mask: np.ndarray  # bool[R, L], True on tokens that the policy sampled and the loss counts
    loss_weights: np.ndarray  # float32[R, L], weight of each token's term, 0 where loss_mask is False
    advantages: np.ndarray  # float32[R, L]
    rollout_logprobs: np.ndarray  # float32[R, L], nats, of the sampling policy; 0 where loss_mask is False
    temperature: np.ndarray  # float32[R, L], logits are divided by it; 1 on prompt tokens and padding
    policy_version: np.ndarray  # int32[R, L], version that sampled the token, -1 elsewhere
    old_logprobs: np.ndarray | None = None  # float32[R, L]; None: rollout_logprobs stand in (bypass)
    ref_logprobs: np.ndarray | None = None  # float32[R, L]; None: no reference model

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value.shape != self.token_ids.shape:
                raise ValueError(f"{name} has shape {value.shape}, token_ids {self.token_ids.shape}")

    @property
    def num_tokens(self) -> int:
        """Tokens of samples, without padding."""
        return int((self.sample_index >= 0).sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """A data-parallel rank's share of one or more prompts' samples; one or more of them make an optimizer step."""

    step: int  # optimizer step it belongs to, from 0
    micro_batches: tuple[MicroBatch, ...]
    is_last: bool  # the optimizer steps after this one
    loss_scale: float  # multiplies the summed gradient before clipping; valid when is_last; 0: the step has no samples
    learning_rate_progress: float  # in [0, 1], of steps or of prompts, whichever is ahead; valid when is_last
