"""Serialise the rollout groups of a checkpoint that are not trained yet, and read them back.

An .npz archive without pickles: `token_ids` int32[N] and `logprobs` float32[M] of all groups one after another, as
`PackedGroup` has them, and `description`, uint8[D]: JSON in UTF-8 with everything else.
"""

import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from coati_rl.batching.packed_group import PackedGroup, PackedTrajectory, as_packed
from coati_rl.checkpoint.format import FORMAT_VERSION, VERSION_KEY, migrate_rollouts
from coati_rl.types import Baseline, Prompt, RolloutGroup, Score

_SCORE_FIELDS = tuple(field.name for field in fields(Score))
_ARRAYS = {"token_ids": np.int32, "logprobs": np.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedGroup:
    """Hold a group that waits to be trained."""

    group: RolloutGroup
    sync_index: int  # of its lease


@dataclass(frozen=True, kw_only=True, slots=True)
class UntrainedRollouts:
    """Hold rollouts received before a checkpoint and not trained; sync 0 is the checkpoint's, earlier ones negative."""

    finished: tuple[FinishedGroup, ...] = ()  # to be trained, the oldest lease first
    dropped: tuple[RolloutGroup, ...] = ()  # since the last step, for its record
    samples_failed: int = 0  # of finished groups, since the last step
    sync_index_of: Mapping[int, int] = field(default_factory=dict)  # policy version -> the sync that sent it
    identities: Mapping[int, str] = field(default_factory=dict)  # policy version -> its weights'

    def to_bytes(self) -> bytes:
        """Return the archive in the newest format."""
        groups = [*(finished.group for finished in self.finished), *self.dropped]
        packed = [as_packed(group) for group in groups]
        description = {
            VERSION_KEY: FORMAT_VERSION,
            "lease_syncs": [finished.sync_index for finished in self.finished],
            "samples_failed": self.samples_failed,
            "sync_index_of": sorted(self.sync_index_of.items()),
            "identities": sorted(self.identities.items()),
            "groups": [describe_group(*pair) for pair in zip(groups, packed, strict=True)],
        }
        arrays = {
            name: np.concatenate([np.empty(0, dtype), *(getattr(each, name) for each in packed)]).astype(dtype)
            for name, dtype in _ARRAYS.items()
        }
        buffer = io.BytesIO()
        text = np.frombuffer(json.dumps(description).encode(), dtype=np.uint8)
        np.savez(buffer, description=text, **arrays)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, prompt_of: Callable[[str], Prompt]) -> "UntrainedRollouts":
        """Parse what `to_bytes` wrote, in any format; `prompt_of` finds a prompt by its uid.

        Raises: ValueError if it cannot be parsed.
        """
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                content: dict[str, Any] = dict(archive)
            content["description"] = json.loads(content["description"].tobytes())
            content = migrate_rollouts(content)
            description = content["description"]
            arrays = {name: content[name].astype(dtype, casting="no") for name, dtype in _ARRAYS.items()}
            groups = _read_groups(description["groups"], prompt_of, **arrays)
            lease_syncs = description["lease_syncs"]
            return cls(
                finished=tuple(FinishedGroup(group=g, sync_index=s) for g, s in zip(groups, lease_syncs, strict=False)),
                dropped=tuple(groups[len(lease_syncs) :]),
                samples_failed=description["samples_failed"],
                sync_index_of=dict(description["sync_index_of"]),
                identities=dict(description.get("identities", ())),  # absent from what 0.2.0 wrote
            )
        except (OSError, EOFError, zipfile.BadZipFile, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"the rollouts cannot be read: {error!r}") from error


def describe_group(group: RolloutGroup, packed: PackedGroup) -> dict[str, Any]:
    """Return the JSON fields of a group: all but its arrays and its prompt's content."""
    return {"uid": group.prompt.uid, "temperature": group.temperature, **describe_packed(packed)}


def describe_packed(packed: PackedGroup) -> dict[str, Any]:
    """Return the JSON fields of a packed group: all but its arrays and its lease."""
    return {
        "producer_id": packed.producer_id,
        "loss_mask": packed.loss_mask,
        "policy_versions": packed.policy_versions,
        "temperatures": packed.temperature,
        "trajectories": [each.to_json() for each in packed.trajectories],
        "scores": [_describe_score(score) for score in packed.scores],
        **({"records": packed.records} if packed.records else {}),
        **({"baseline": asdict(packed.baseline)} if packed.baseline is not None else {}),
    }


def _describe_score(score: Score) -> dict[str, Any]:
    """Return the fields as they are: `asdict`, which copies them, took most of the time of a group."""
    return {name: getattr(score, name) for name in _SCORE_FIELDS}


def _read_baseline(described: dict[str, Any] | None) -> Baseline | None:
    return None if described is None else Baseline(**{**described, "score": Score(**described["score"])})


def _read_groups(
    described: Sequence[dict[str, Any]],
    prompt_of: Callable[[str], Prompt],
    *,
    token_ids: np.ndarray,
    logprobs: np.ndarray,
) -> list[RolloutGroup]:
    groups = []
    for number, group in enumerate(described):
        num_tokens, num_loss_tokens = _lengths(group)
        parts = {"token_ids": token_ids[:num_tokens], "logprobs": logprobs[:num_loss_tokens]}
        # Below those of the resumed run, in the same order.
        groups.append(read_group(group, prompt_of, **parts, lease_id=number - len(described)))
        token_ids, logprobs = token_ids[num_tokens:], logprobs[num_loss_tokens:]
    if len(token_ids) or len(logprobs):
        raise ValueError("the rollouts cannot be read: arrays and groups differ in length")
    return groups


def read_group(
    described: Mapping[str, Any],
    prompt_of: Callable[[str], Prompt],
    *,
    token_ids: np.ndarray,
    logprobs: np.ndarray,
    lease_id: int,
) -> RolloutGroup:
    """Restore a group from what `describe_group` returned, and its arrays.

    Args:
        described: its JSON fields.
        prompt_of: finds a prompt by its uid.
        token_ids: int32[N].
        logprobs: float32[M].
        lease_id: for the group.
    Raises: ValueError naming the prompt if arrays and description do not match.
    """
    packed = read_packed(described, token_ids=token_ids, logprobs=logprobs, lease_id=lease_id)
    try:
        return packed.unpack(prompt_of(described["uid"]), temperature=described["temperature"])
    except ValueError as error:
        raise ValueError(f"the rollouts cannot be read: {described['uid']}: {error}") from error


def read_packed(
    described: Mapping[str, Any], *, token_ids: np.ndarray, logprobs: np.ndarray, lease_id: int
) -> PackedGroup:
    """Restore a packed group from what `describe_packed` returned, its arrays and its lease."""
    return PackedGroup(
        lease_id=lease_id,
        producer_id=described["producer_id"],
        token_ids=token_ids,
        logprobs=logprobs,
        loss_mask=described["loss_mask"],
        policy_versions=described["policy_versions"],
        temperature=described["temperatures"],
        trajectories=tuple(PackedTrajectory.of_json(each) for each in described["trajectories"]),
        scores=tuple(Score(**score) for score in described["scores"]),
        records=tuple(described.get("records", ())),
        baseline=_read_baseline(described.get("baseline")),
    )


def _lengths(described: Mapping[str, Any]) -> tuple[int, int]:
    """Return the tokens of a group, and those of them in the loss."""
    num_tokens = sum(trajectory["num_tokens"] for trajectory in described["trajectories"])
    return num_tokens, sum(length for is_in_loss, length in described["loss_mask"] if is_in_loss)
