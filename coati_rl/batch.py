"""Define the micro-batch, the input of a trainer's forward and backward and of an objective's loss.

A micro-batch is R rows of L tokens. A row holds consecutive segments, then padding. A segment is a sequence of tokens
that attends to itself, causally, and to its ancestors' tokens, if it has a parent: a prompt that several responses
share is their parent. Without parents a segment is a whole sample (prompt then response). A sample is a path of
segments from a root; its tokens are in each segment of the path once, however many samples share it.

Model arrays are [R, L]. Loss arrays are [R, M]: the M tokens of each row that the loss reads, in reading order, then
padding, on which `loss_mask` is False. `sources` holds the place in the row that predicts each of them: the token
before, or, for the first token after a shared prompt, the prompt's last. The objective defines further loss arrays.

A loss is a sum over tokens whose weights hold the aggregation but not the global denominator: `loss_scale` of the
step's last mini-batch holds it, as it is known only then. So the gradient does not depend on the split into rows,
micro-batches, mini-batches and ranks.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

LOSS_ARRAYS = ("token_ids", "sources", "loss_mask", "sample_index")  # in every micro-batch

# Values of loss arrays where `loss_mask` is False; 0 in arrays not named here.
PADDING: Mapping[str, float] = {"temperature": 1.0, "policy_version": -1, "sample_index": -1}


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Hold the input of one forward and backward of one data-parallel rank."""

    token_ids: np.ndarray  # int64[R, L], padded with 0
    position_ids: np.ndarray  # int64[R, L], places in the sample, from 0, also behind a parent; or in the padding
    segments: np.ndarray  # int32[K, 4], a row per segment of row, start, length, parent: a segment's index, or -1
    # Each [R, M]. token_ids: int64, the tokens to be predicted; sources: int64, a place in the row; loss_mask: bool,
    # True on tokens that the loss counts; sample_index: int32, of the sample in its `RaggedSamples`, -1 on padding.
    # Of the policy gradient, each float32 but for the last: loss_weights, of each token's term; advantages;
    # rollout_logprobs, nats, of the sampling policy; temperature, which logits are divided by; policy_version, int32,
    # that sampled the token. Where the trainer scored them: old_logprobs, ref_logprobs and teacher_logprobs, nats;
    # teacher_hidden, float32[R, M, G], the teacher's hidden states that predict the tokens. With a critic:
    # token_rewards; is_cut, 1 on samples that a limit cut; old_values and returns, of the critic before the update.
    # Of selected tokens: left_out and held, bool, see `SelectedTokens`, and old_entropy, nats.
    loss_arrays: Mapping[str, np.ndarray]
    sample_arrays: Mapping[str, np.ndarray] = field(default_factory=dict)  # each [S, ...], by sample_index
    routes: np.ndarray | None = None  # uint[R, L, D, K], see `coati_rl.routes`; None: no token's are known

    def __post_init__(self) -> None:
        if self.position_ids.shape != self.token_ids.shape:
            raise ValueError(f"position_ids has shape {self.position_ids.shape}, token_ids {self.token_ids.shape}")
        if missing := [name for name in LOSS_ARRAYS if name not in self.loss_arrays]:
            raise ValueError(f"a micro-batch needs the loss arrays {', '.join(missing)}")
        shape = self.loss_arrays["token_ids"].shape
        if self.routes is not None and self.routes.shape[:2] != self.token_ids.shape:
            raise ValueError(f"routes has shape {self.routes.shape}, token_ids {self.token_ids.shape}")
        for name, array in self.loss_arrays.items():
            if array.shape[:2] != shape or shape[:1] != self.token_ids.shape[:1]:
                raise ValueError(f"{name} has shape {array.shape}, token_ids of the loss {shape}")

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of samples, without padding; shared tokens count once."""
        return int(self.segments[:, 2].sum())

    def with_arrays(self, **arrays: np.ndarray) -> "MicroBatch":
        """Return the micro-batch with these loss arrays [R, M] added or replaced."""
        return self.replace_arrays({**self.loss_arrays, **arrays})

    def replace_arrays(self, arrays: Mapping[str, np.ndarray]) -> "MicroBatch":
        """Return the micro-batch with these loss arrays only; they may have another M."""
        return dataclasses.replace(self, loss_arrays=arrays)


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """Hold a data-parallel rank's part of a mini-batch; one or more mini-batches make an optimizer step."""

    step: int  # optimizer step it belongs to, from 0
    micro_batches: tuple[MicroBatch, ...]
    is_last: bool  # the optimizer steps after this one
    loss_scale: float  # multiplies the summed gradient before clipping; valid when is_last; 0: the step has no samples
    learning_rate_progress: float  # in [0, 1], of steps or of prompts, whichever is ahead; valid when is_last
