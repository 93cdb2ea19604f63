"""Define the compact form in which a data-parallel rank's samples are sent from the coordinator to its trainers.

Tokens of all samples are concatenated, without padding; a prompt that several samples share is sent once; an array that
is constant over many tokens, such as an advantage or a policy version, is run-length encoded. The plan assigns samples
to micro-batches; each trainer packs its own (`packing`). At 8 responses of 512 tokens to a prompt of 100 this takes 8.3
bytes a sampled token (`scripts/bench/hand_over.py`); packed rows would take 41, by the sizes of arrays.
S samples, T tokens, N of them counted by the loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coati_rl.routes import unknown_like
from coati_rl.run_lengths import Runs, count_runs, decode_runs, encode_runs, slices

# Arrays that mark a sample whose rollout_logprobs are not of the model's distribution, for who chooses what to train.
CUT_OFF, PENALIZED = "cut_off", "penalized"  # renormalised over the tokens that top-p, top-k or min-p left; a penalty
_SINGLE_RUN = (0,)  # strides


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Hold one training sequence: a prefix that it may share with others, then T tokens of its own."""

    uid: str  # of the prompt or row, for messages
    number: int  # among the samples of that uid, from 0
    prefix_ids: np.ndarray  # int[P], not in the loss; the same object in samples that share it
    token_ids: np.ndarray  # int[T]
    loss_mask: np.ndarray  # bool[T], True on the N tokens that the loss counts
    arrays: Mapping[str, np.ndarray | float]  # [N] each, or one number for all N
    num_loss_tokens: int = field(init=False)  # N
    routes: np.ndarray | None = None  # uint[P + T, D, K], see `coati_rl.routes`; samples share those of their prefix

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_loss_tokens", int(np.count_nonzero(self.loss_mask)))
        if len(self.loss_mask) != len(self.token_ids):
            raise ValueError(f"loss_mask has {len(self.loss_mask)} entries, token_ids {len(self.token_ids)}")
        if not len(self.prefix_ids) and len(self.loss_mask) and self.loss_mask[0]:
            raise ValueError(f"{self.uid}, sample {self.number}: no token predicts the first one; mask it")
        for name, array in self.arrays.items():
            if isinstance(array, np.ndarray) and len(array) != self.num_loss_tokens:
                raise ValueError(f"{name} has {len(array)} entries for {self.num_loss_tokens} loss tokens")

    def __len__(self) -> int:
        return len(self.prefix_ids) + len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedArray:
    """Hold an array [N] as runs."""

    runs: Runs
    dtype: str

    def split(self, lengths: Sequence[int]) -> Sequence[np.ndarray] | np.ndarray:
        """Return the parts of these lengths, or, where the values of a part are equal, one value for each."""
        if len(self.runs) == 1:
            return np.full(len(lengths), self.runs[0][0], dtype=self.dtype)
        if [length for _, length in self.runs] == lengths:
            return np.array([value for value, _ in self.runs], dtype=self.dtype)
        array = decode_runs(self.runs, self.dtype)
        return [array[part] for part in slices(lengths)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSamples:
    """Hold S samples one by one; their arrays share the memory of the joined ones."""

    prefix_ids: Sequence[np.ndarray]  # int32[P] each
    token_ids: Sequence[np.ndarray]  # int32[T] each
    loss_masks: Sequence[np.ndarray]  # bool[T] each
    arrays: Mapping[str, Sequence[np.ndarray] | np.ndarray]  # [N] each; or [S], where a sample's N values are equal
    lengths: Sequence[int]  # P + T of each
    num_loss_tokens: Sequence[int]  # N of each
    piece_of: Sequence[int] | None = None  # see `RaggedSamples`
    routes: Sequence[np.ndarray] | None = None  # uint[P + T, D, K] each


@dataclass(frozen=True, kw_only=True, slots=True)
class RaggedSamples:
    """Hold S samples, each array concatenated over all of them."""

    prefix_ids: np.ndarray  # int32, of all distinct prefixes
    prefix_lengths: np.ndarray  # int32[prefixes]
    prefix_of: np.ndarray  # int32[S], which prefix each sample begins with
    token_ids: np.ndarray  # int32[T of all samples]
    lengths: np.ndarray  # int32[S], T of each
    mask_bits: np.ndarray  # uint8, loss_mask of all T tokens, 8 in a byte
    arrays: Mapping[str, np.ndarray | EncodedArray] = field(default_factory=dict)  # [N of all samples] each
    # int32[S]: samples with the same number, in one micro-batch, have their common prefixes computed once. None: none.
    piece_of: np.ndarray | None = None
    routes: np.ndarray | None = None  # uint[tokens, D, K], of all distinct prefixes, then of all own tokens

    @classmethod
    def of(cls, samples: Sequence[Sample], *, piece_of: np.ndarray | None = None) -> "RaggedSamples":
        """Join samples that have the same arrays."""
        prefixes = {id(sample.prefix_ids): sample.prefix_ids for sample in samples}
        number = {key: index for index, key in enumerate(prefixes)}
        names = samples[0].arrays.keys() if samples else ()
        return cls(
            prefix_ids=_joined(list(prefixes.values()), np.int32),
            prefix_lengths=np.array([len(prefix) for prefix in prefixes.values()], dtype=np.int32),
            prefix_of=np.array([number[id(sample.prefix_ids)] for sample in samples], dtype=np.int32),
            token_ids=_joined([sample.token_ids for sample in samples], np.int32),
            lengths=np.array([len(sample.token_ids) for sample in samples], dtype=np.int32),
            mask_bits=np.packbits(_joined([sample.loss_mask for sample in samples], bool)),
            arrays={name: _join_arrays(samples, name) for name in names},
            piece_of=piece_of,
            routes=_join_routes(samples),
        )

    def split(self) -> SplitSamples:
        """Return the samples one by one, without uids and numbers."""
        prefixes = [self.prefix_ids[part] for part in slices(self.prefix_lengths.tolist())]
        prefix_ids = [prefixes[prefix] for prefix in self.prefix_of.tolist()]
        own = slices(self.lengths.tolist())
        mask = np.unpackbits(self.mask_bits, count=len(self.token_ids)).view(bool)
        loss_masks = [mask[part] for part in own]
        lengths = self.lengths.tolist()
        num_loss_tokens = lengths if mask.all() else [int(np.count_nonzero(each)) for each in loss_masks]
        counted = slices(num_loss_tokens)
        return SplitSamples(
            prefix_ids=prefix_ids,
            token_ids=[self.token_ids[part] for part in own],
            loss_masks=loss_masks,
            arrays={
                name: array.split(num_loss_tokens) if isinstance(array, EncodedArray) else [array[p] for p in counted]
                for name, array in self.arrays.items()
            },
            lengths=[len(each) + num for each, num in zip(prefix_ids, lengths, strict=True)],
            num_loss_tokens=num_loss_tokens,
            piece_of=None if self.piece_of is None else self.piece_of.tolist(),
            routes=self._split_routes(),
        )

    def _split_routes(self) -> list[np.ndarray] | None:
        if self.routes is None:
            return None
        of_prefixes, own = np.split(self.routes, [len(self.prefix_ids)])
        prefixes = [of_prefixes[part] for part in slices(self.prefix_lengths.tolist())]
        parts = zip(self.prefix_of.tolist(), slices(self.lengths.tolist()), strict=True)
        return [np.concatenate([prefixes[prefix], own[part]]) for prefix, part in parts]

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all samples, each with its prefix."""
        return int(self.prefix_lengths[self.prefix_of].sum() + self.lengths.sum())

    @property
    def num_loss_tokens(self) -> int:
        """Return the tokens of all samples in the loss."""
        return int(np.unpackbits(self.mask_bits, count=len(self.token_ids)).sum())

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all arrays; 8 for each run."""
        arrays = (self.prefix_ids, self.prefix_lengths, self.prefix_of, self.token_ids, self.lengths, self.mask_bits)
        dense = sum(array.nbytes for array in arrays) + (0 if self.piece_of is None else self.piece_of.nbytes)
        dense += 0 if self.routes is None else self.routes.nbytes
        return dense + sum(8 * len(a.runs) if isinstance(a, EncodedArray) else a.nbytes for a in self.arrays.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class RaggedBatch:
    """Hold a data-parallel rank's part of a mini-batch, and its plan of micro-batches; see `MiniBatch`."""

    step: int
    samples: RaggedSamples
    plan: tuple[tuple[int, ...], ...]  # the samples of each micro-batch; empty: a blank one
    one_sample_per_row: bool
    is_last: bool
    loss_scale: float
    learning_rate_progress: float
    # Samples without a gradient that are computed for the metrics alone, in micro-batches of their own.
    measured_samples: RaggedSamples = field(default_factory=lambda: RaggedSamples.of(()))
    measured_plan: tuple[tuple[int, ...], ...] = ()


def _join_arrays(samples: Sequence[Sample], name: str) -> np.ndarray | EncodedArray:
    """Concatenate an array of all samples [N], as runs where that is shorter."""
    parts = [sample.arrays[name] for sample in samples]
    if not any(isinstance(part, np.ndarray) for part in parts):
        runs = tuple((float(part), sample.num_loss_tokens) for sample, part in zip(samples, parts, strict=True))
        return EncodedArray(runs=runs, dtype="float32")
    if (constant := _one_run(parts)) is not None:
        return constant
    pairs = zip(samples, parts, strict=True)
    full = [p if isinstance(p, np.ndarray) else np.full(s.num_loss_tokens, p, np.float32) for s, p in pairs]
    joined: np.ndarray = np.concatenate(full)
    if 2 * count_runs(joined) >= len(joined):
        return joined
    return EncodedArray(runs=encode_runs(joined), dtype=joined.dtype.str)


def _join_routes(samples: Sequence[Sample]) -> np.ndarray | None:
    """Return the routes of distinct prefixes, of the first sample with each, then of all own tokens, if any."""
    known = next((sample.routes for sample in samples if sample.routes is not None), None)
    if known is None:
        return None
    prefixes, own = dict[int, np.ndarray](), list[np.ndarray]()
    for sample in samples:
        routes = unknown_like(len(sample), known) if sample.routes is None else sample.routes
        prefixes.setdefault(id(sample.prefix_ids), routes[: len(sample.prefix_ids)])
        own.append(routes[len(sample.prefix_ids) :])
    joined: np.ndarray = np.concatenate([*prefixes.values(), *own])
    return joined


def _one_run(parts: Sequence[np.ndarray | float]) -> EncodedArray | None:
    """Encode arrays of one value each, the same, as policy versions mostly are, without reading them.

    Returns: None unless all are arrays that `decode_runs` made of single runs, or parts of such.
    """
    length, values = 0, set()
    for part in parts:
        if not isinstance(part, np.ndarray) or part.strides != _SINGLE_RUN:
            return None
        if num := len(part):
            length += num
            values.add((part.item(0), part.dtype))
    if len(values) != 1 or length <= 2:
        return None
    ((value, dtype),) = values
    return EncodedArray(runs=((value, length),), dtype=dtype.str)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)
