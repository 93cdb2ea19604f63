"""Serialise the rollout groups of a checkpoint that are not trained yet, and read them back.

An .npz archive without pickles: `token_ids` int32[N] and `logprobs` float32[M] of all groups one after another, as
`PackedGroup` has them, `routes` uint8[B], the bytes of those groups that have routes, and `description`, uint8[D]:
JSON in UTF-8 with everything else.
"""

import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import prod
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
        if any(each.routes is not None for each in packed):  # else as earlier versions have it
            arrays["routes"] = np.concatenate([route_bytes(each) for each in packed])
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
            arrays["routes"] = content.get("routes", np.empty(0, np.uint8))
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


def describe_group(group: RolloutGroup, packed: PackedGroup, **rows: Any) -> dict[str, Any]:
    """Return the JSON fields of a group: all but its arrays and its prompt's content; see `describe_packed`."""
    return {"uid": group.prompt.uid, "temperature": group.temperature, **describe_packed(packed, **rows)}


def describe_packed(packed: PackedGroup, *, trajectories: Any = None, scores: Any = None) -> dict[str, Any]:
    """Return the JSON fields of a packed group: all but its arrays and its lease.

    Args:
        packed: to be described.
        trajectories: its trajectories in another form of JSON; None: one after the other.
        scores: the same of its scores.
    """
    return {
        "producer_id": packed.producer_id,
        "loss_mask": packed.loss_mask,
        "policy_versions": packed.policy_versions,
        "temperatures": packed.temperature,
        "trajectories": trajectories or [each.to_json() for each in packed.trajectories],
        "scores": scores or [_describe_score(score) for score in packed.scores],
        **({"records": packed.records} if packed.records else {}),
        **({"baseline": asdict(packed.baseline)} if packed.baseline is not None else {}),
        **({} if packed.routes is None else {"routes": [packed.routes.dtype.str, *packed.routes.shape]}),
    }


def route_bytes(packed: PackedGroup) -> np.ndarray:
    """Return uint8[B], the bytes of a group's routes, whose dtype and shape its description has; none without."""
    return np.empty(0, np.uint8) if packed.routes is None else packed.routes.reshape(-1).view(np.uint8)


def _num_route_bytes(described: Mapping[str, Any]) -> int:
    dtype, *shape = described.get("routes", ("u1", 0))
    num_bytes: int = prod(shape) * np.dtype(dtype).itemsize
    return num_bytes


def _read_routes(described: Mapping[str, Any], data: np.ndarray) -> np.ndarray | None:
    if "routes" not in described:
        return None
    dtype, *shape = described["routes"]
    routes: np.ndarray = data.view(dtype).reshape(shape)
    return routes


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
    routes: np.ndarray,
) -> list[RolloutGroup]:
    groups = []
    for number, group in enumerate(described):
        num_tokens, num_loss_tokens = _lengths(group)
        num_bytes = _num_route_bytes(group)
        parts = {
            "token_ids": token_ids[:num_tokens],
            "logprobs": logprobs[:num_loss_tokens],
            "routes": routes[:num_bytes],
        }
        # Below those of the resumed run, in the same order.
        groups.append(read_group(group, prompt_of, **parts, lease_id=number - len(described)))
        token_ids, logprobs, routes = token_ids[num_tokens:], logprobs[num_loss_tokens:], routes[num_bytes:]
    if len(token_ids) or len(logprobs) or len(routes):
        raise ValueError("the rollouts cannot be read: arrays and groups differ in length")
    return groups


def read_group(
    described: Mapping[str, Any],
    prompt_of: Callable[[str], Prompt],
    *,
    token_ids: np.ndarray,
    logprobs: np.ndarray,
    lease_id: int,
    routes: np.ndarray,
) -> RolloutGroup:
    """Restore a group from what `describe_group` returned, and its arrays.

    Args:
        described: its JSON fields.
        prompt_of: finds a prompt by its uid.
        token_ids: int32[N].
        logprobs: float32[M].
        lease_id: for the group.
        routes: uint8[B], of `route_bytes`.
    Raises: ValueError naming the prompt if arrays and description do not match.
    """
    packed = read_packed(described, token_ids=token_ids, logprobs=logprobs, lease_id=lease_id, routes=routes)
    try:
        return packed.unpack(prompt_of(described["uid"]), temperature=described["temperature"])
    except ValueError as error:
        raise ValueError(f"the rollouts cannot be read: {described['uid']}: {error}") from error


def read_packed(
    described: Mapping[str, Any], *, token_ids: np.ndarray, logprobs: np.ndarray, lease_id: int, routes: np.ndarray
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
        routes=_read_routes(described, routes),
    )


def _lengths(described: Mapping[str, Any]) -> tuple[int, int]:
    """Return the tokens of a group, and those of them in the loss."""
    num_tokens = sum(trajectory["num_tokens"] for trajectory in described["trajectories"])
    return num_tokens, sum(length for is_in_loss, length in described["loss_mask"] if is_in_loss)
