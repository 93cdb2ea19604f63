"""Try whether an architecture computes each sample as if it were alone, before anything starts.

A trainer packs samples into rows, pads rows, lets samples share prefixes, and takes log-probabilities from hidden
states. Each needs something of the architecture: layers whose state ends with a sample, frequencies that do not depend
on other samples, logits that are the plain output of the head. To see it, a `tiny_model` of the architecture is run: it
must give what plain transformers gives for each sample alone.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from coati_rl.batch import MicroBatch
from coati_rl.errors import ConfigError
from coati_rl.model_files.classifiers import auto_class_of, kind_of
from coati_rl.model_files.config import read_config
from coati_rl.model_files.stored_views import stored_parameters
from coati_rl.preflight.tiny_model import FIRST_TOKEN, tiny_model
from consumer.models import packed_attention
from consumer.models.loading import attention_of, prepare
from consumer.models.policy_model import has_plain_head, make_input, policy_forward
from consumer.models.scalar_head import scalar_head

TOLERANCE = 1e-4  # nats, float32; more is not rounding
_LENGTHS = (13, 9, 17)  # tokens of the samples: more than a short window, and than a convolution sees
_NUM_SHARED = 5  # tokens of a prefix that samples share

_found: dict[tuple[str, int, bool], "Differences"] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """Hold the largest differences from plain transformers on each sample alone, in nats; of a scalar head, in values.

    NaN is a difference, too: compare with `not difference <= TOLERANCE`.
    """

    alone: float  # one sample in the trainer's own forward
    padded: float  # rows of one sample each
    beside_long: float  # the same beside a sample whose positions go up to the job's longest
    packed: float  # all samples in one row
    shared: float  # samples behind a common prefix; 0 where the attention does not share prefixes
    context: float  # of samples that do see the one before them: what a leak would look like


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePart:
    """Describe a sample, or the part of one behind a prefix that other samples share."""

    token_ids: tuple[int, ...]
    first_position: int = 0
    parent: int = -1  # number of the segment in its row that it continues


def packed_difference(directory: Path, *, name: str, max_tokens: int, has_scalar_head: bool = False) -> float:
    """Return by how many nats samples that are packed into a row change each other; 0 if they do not.

    Args:
        directory: of a model.
        name: the model by its flag, for messages.
        max_tokens: of the job's longest sample.
        has_scalar_head: it is trained with one output in place of the LM head.
    Raises: ConfigError if the trainers cannot compute its samples in rows of their own either, or would write its
        weights under other names than its checkpoints have.
    """
    key = ((directory / "config.json").read_text(encoding="utf-8"), max_tokens, has_scalar_head)
    if key not in _found:
        model = tried_model(directory, name, has_scalar_head=has_scalar_head)
        what = f"{name} ({model.config.model_type})"
        _check_names(model, what)
        _check_head(model, what)
        try:
            tried = differences(model, max_tokens=max_tokens)
        except (
            AttributeError,
            IndexError,
            KeyError,
            NotImplementedError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise ConfigError(
                f"{what}: the trainers cannot run this architecture ({type(error).__name__}: {error})"
            ) from error
        _check_differences(tried, model, what, max_tokens)
        _found[key] = tried
    found = _found[key]
    is_separate = found.packed <= TOLERANCE and found.shared <= TOLERANCE and found.context > 100 * TOLERANCE
    return 0.0 if is_separate else max(found.packed, found.shared, TOLERANCE)


@torch.no_grad()
def differences(model: PreTrainedModel, *, max_tokens: int) -> Differences:
    """Compare the ways in which trainers compute samples; `model` has the attention function that they use."""
    generator = torch.Generator().manual_seed(1)
    size = model.config.get_text_config().vocab_size
    drawn = [torch.randint(FIRST_TOKEN, size, (length,), generator=generator).tolist() for length in _LENGTHS]
    samples = [SamplePart(token_ids=tuple(each)) for each in drawn]
    plain = model
    if model.config._attn_implementation == packed_attention.NAME:
        plain = copy.deepcopy(model)
        plain.set_attn_implementation("sdpa")
    prefix, *ends = (sample.token_ids for sample in samples)
    of_plain = [plain_values(plain, sample.token_ids) for sample in samples]
    joined = plain_values(plain, sum((sample.token_ids for sample in samples), ()))
    last = samples[-1]
    long = SamplePart(token_ids=last.token_ids, first_position=max(0, max_tokens - len(last.token_ids)))
    return Differences(
        alone=max(
            _distance(_values(model, [[sample]])[:1], [want]) for sample, want in zip(samples, of_plain, strict=True)
        ),
        padded=_distance(_values(model, [[sample] for sample in samples]), of_plain),
        beside_long=_distance(_values(model, [[samples[0]], [long]])[:1], of_plain[:1]),
        packed=_distance(_values(model, [samples]), of_plain),
        shared=_shared_difference(model, plain, prefix[:_NUM_SHARED], ends),
        context=_distance([joined[-(len(last.token_ids) - 1) :]], of_plain[-1:]),
    )


def _shared_difference(
    model: PreTrainedModel, plain: PreTrainedModel, prefix: tuple[int, ...], ends: Sequence[tuple[int, ...]]
) -> float:
    if model.config._attn_implementation != packed_attention.NAME:
        return 0.0
    behind = [SamplePart(token_ids=end, first_position=len(prefix), parent=0) for end in ends]
    of_prefix, *got = _values(model, [[SamplePart(token_ids=prefix), *behind]])
    wanted = [plain_values(plain, prefix + end) for end in ends]
    return _distance([torch.cat([of_prefix, each]) for each in got], wanted)


def _values(model: PreTrainedModel, rows: Sequence[Sequence[SamplePart]]) -> list[Tensor]:
    """Return the trainer's log-probabilities of each segment but for a sample's first token, or values."""
    batch, counts = micro_batch_of(rows)
    values, _ = policy_forward(model, make_input(batch, device=torch.device("cpu")))
    return [part for row, sizes in zip(values, counts, strict=True) for part in row[: sum(sizes)].split(sizes)]


def plain_values(plain: PreTrainedModel, token_ids: tuple[int, ...]) -> Tensor:
    """Return plain transformers' values of one sample, float32[T - 1]."""
    tokens = torch.tensor([token_ids])
    head = scalar_head(plain)
    if head is not None:
        hidden = plain.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return head(hidden)[0, :-1, 0].float()
    logits = plain(input_ids=tokens, use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[0, 1:, None])[:, 0]


def _distance(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(got, wanted, strict=True))


def micro_batch_of(rows: Sequence[Sequence[SamplePart]]) -> tuple[MicroBatch, list[list[int]]]:
    """Return a micro-batch of these rows, and the number of loss tokens of each segment."""
    length = max(sum(len(segment.token_ids) for segment in row) for row in rows)
    token_ids, position_ids = np.zeros((2, len(rows), length), dtype=np.int64)
    position_ids[:] = np.arange(length)  # of the padding
    segments = list[tuple[int, int, int, int]]()
    targets, sources, counts = list[list[int]](), list[list[int]](), list[list[int]]()
    for r, row in enumerate(rows):
        first_of_row, place = len(segments), 0
        targets.append(list[int]())
        sources.append(list[int]())
        counts.append(list[int]())
        for segment in row:
            size, before = len(segment.token_ids), -1
            token_ids[r, place : place + size] = segment.token_ids
            position_ids[r, place : place + size] = np.arange(size) + segment.first_position
            parent = -1
            if segment.parent >= 0:
                parent = first_of_row + segment.parent
                before = segments[parent][1] + segments[parent][2] - 1  # the prefix's last token predicts the first
            segments.append((r, place, size, parent))
            places = [*([before] if before >= 0 else []), *range(place, place + size - 1)]
            sources[r] += places
            targets[r] += segment.token_ids[size - len(places) :]
            counts[r].append(len(places))
            place += size
    most = max(map(len, targets))
    mask = np.array([[index < len(row) for index in range(most)] for row in targets])
    arrays = {
        "token_ids": np.array([row + [0] * (most - len(row)) for row in targets], dtype=np.int64),
        "sources": np.array([row + [0] * (most - len(row)) for row in sources], dtype=np.int64),
        "loss_mask": mask,
        "sample_index": np.where(mask, 0, -1).astype(np.int32),
        "temperature": np.ones(mask.shape, dtype=np.float32),
    }
    batch = MicroBatch(
        token_ids=token_ids,
        position_ids=position_ids,
        segments=np.array(segments, dtype=np.int32),
        loss_arrays=arrays,
    )
    return batch, counts


def tried_model(directory: Path, name: str, *, has_scalar_head: bool) -> PreTrainedModel:
    """Return a tiny model of the architecture with the trainers' attention function. Raises: ConfigError."""
    config = read_config(directory, name)
    auto_class: Any = AutoModelForCausalLM
    if has_scalar_head:
        auto_class, config.num_labels = auto_class_of(kind_of(config, ())), 1
    try:
        model = tiny_model(config, lambda each: auto_class.from_config(each, attn_implementation=attention_of(each)))
    except ValueError as error:
        raise ConfigError(
            f"{name} ({config.model_type}): transformers cannot run this architecture as the trainers need it ({error})"
        ) from error
    return prepare(model, gradient_checkpointing=False)


def _check_names(model: PreTrainedModel, what: str) -> None:
    """Raise ConfigError unless the tensors of the architecture's checkpoints are parts of the module's parameters.

    They are compared with what transformers itself would save, bit for bit, and put together again.
    """
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    saved = revert_weight_conversion(model, dict(own))
    try:
        stored = stored_parameters(model)
        found = dict(tensor for name, each in stored.items() for tensor in each.split(own[name]))
        is_same = found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)
        joined = {name: each.join(saved.__getitem__) for name, each in stored.items()}
        is_same = is_same and all(torch.equal(joined[name], own[name]) for name in own)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error
    if not is_same:
        raise ConfigError(f"{what}: tensors of its checkpoints are not parts of its parameters; it cannot be trained")
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffer = next((name for name in model.state_dict() if name not in tied), None)
    if buffer is not None and any(each.views for each in stored.values()):  # as a router's bias, which chooses experts
        raise ConfigError(
            f"{what}: its checkpoints hold {buffer}, which is no parameter: weight syncs and checkpoints would lack "
            "it, so that it cannot be trained yet"
        )


def _check_head(model: PreTrainedModel, what: str) -> None:
    if scalar_head(model) is None and not has_plain_head(model):
        raise ConfigError(f"{what}: {type(model).__name__} has no plain LM head, which training needs")


def _check_differences(found: Differences, model: PreTrainedModel, what: str, max_tokens: int) -> None:
    """Raise ConfigError if rows of one sample each are not computed as plain transformers does."""
    if not found.alone <= TOLERANCE:
        raise ConfigError(
            f"{what}: log-probabilities of the LM head's plain output differ by {found.alone:.2g} nats from those of "
            f"the model's own logits{_changed_by(model)}, which training does not support"
        )
    if not found.padded <= TOLERANCE:
        raise ConfigError(
            f"{what}: a sample's log-probabilities change by {found.padded:.2g} nats when longer samples are beside it "
            "in a padded batch, so that they would depend on the batch; this architecture cannot be trained"
        )
    if not found.beside_long <= TOLERANCE:
        remedy = next((f"use samples of at most {n} tokens" for n in _shorter_lengths(model, max_tokens)), None)
        raise ConfigError(
            f"{what}: its position embeddings depend on the longest sample of a batch: {max_tokens} tokens beside a "
            f"short sample change its log-probabilities by {found.beside_long:.2g} nats; "
            f"{remedy or 'this architecture cannot be trained'}"
        )


def _shorter_lengths(model: PreTrainedModel, max_tokens: int) -> Iterator[int]:
    """Yield the lengths in the config, the longest first, up to which samples do not depend on each other."""
    config = model.config.get_text_config()
    settings = {**config.to_dict(), **(getattr(config, "rope_parameters", None) or {})}
    lengths = {value for name, value in settings.items() if "position_embeddings" in name and isinstance(value, int)}
    for length in sorted(lengths, reverse=True):
        if length < max_tokens and differences(model, max_tokens=length).beside_long <= TOLERANCE:
            yield length


def _changed_by(model: PreTrainedModel) -> str:
    """Return settings of the config whose names say that they scale or cap logits, for a message."""
    settings = model.config.get_text_config().to_dict()
    named = [
        f"{name} {value}"
        for name, value in settings.items()
        if ("logit" in name or "lm_head" in name) and isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return f" (see {', '.join(named)} in config.json)" if named else ""
