"""Write rollout groups that are not trained yet to bytes, and read them back: what a checkpoint keeps of rollouts.

An .npz archive without pickles: `token_ids` int32[T], `logprobs` float32[T] and `policy_versions` int32[T] of all
responses one after another (T tokens in all), and `description`, uint8[N]: JSON in UTF-8 with everything else.
"""

import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from coati_rl.types import Completion, Prompt, RolloutGroup, Score

_ARRAYS = {"token_ids": np.int32, "logprobs": np.float32, "policy_versions": np.int32}


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedGroup:
    """A group that waits to be trained."""

    group: RolloutGroup
    sync_index: int  # of its lease


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRollouts:
    """Describe what came in before a checkpoint and is not trained; sync 0 is the checkpoint's, those before are
    negative.
    """

    finished: tuple[FinishedGroup, ...] = ()  # to be trained, the oldest lease first
    dropped: tuple[RolloutGroup, ...] = ()  # since the last step, for its record
    samples_failed: int = 0  # of finished groups, since the last step
    sync_index_of: Mapping[int, int] = field(default_factory=dict)  # policy version -> the sync that brought it

    def to_bytes(self) -> bytes:
        """The archive."""
        groups = [*(finished.group for finished in self.finished), *self.dropped]
        completions = [completion for group in groups for completion in group.completions]
        description = {
            "lease_syncs": [finished.sync_index for finished in self.finished],
            "samples_failed": self.samples_failed,
            "sync_index_of": sorted(self.sync_index_of.items()),
            "groups": [_describe(group) for group in groups],
        }
        arrays = {
            name: np.concatenate([np.empty(0, dtype), *(getattr(each, name) for each in completions)]).astype(dtype)
            for name, dtype in _ARRAYS.items()
        }
        buffer = io.BytesIO()
        text = np.frombuffer(json.dumps(description).encode(), dtype=np.uint8)
        np.savez(buffer, description=text, **arrays)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, prompt_of: Callable[[str], Prompt]) -> "KeptRollouts":
        """The inverse of `to_bytes`; `prompt_of` finds a prompt by its uid.

        Raises: ValueError if this is no such archive.
        """
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                description = json.loads(archive["description"].tobytes())
                arrays = [archive[name].astype(dtype, casting="no") for name, dtype in _ARRAYS.items()]
            groups = _read_groups(description["groups"], arrays, prompt_of)
            lease_syncs = description["lease_syncs"]
            return cls(
                finished=tuple(FinishedGroup(group=g, sync_index=s) for g, s in zip(groups, lease_syncs, strict=False)),
                dropped=tuple(groups[len(lease_syncs) :]),
                samples_failed=description["samples_failed"],
                sync_index_of=dict(description["sync_index_of"]),
            )
        except (OSError, EOFError, zipfile.BadZipFile, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"the rollouts cannot be read: {error!r}") from error


def _describe(group: RolloutGroup) -> dict[str, Any]:
    """All of a group but its arrays and its prompt's content."""
    responses = [
        {"num_tokens": len(c.token_ids), "finish_reason": c.finish_reason, "text": c.text, "score": asdict(score)}
        for c, score in zip(group.completions, group.scores, strict=True)
    ]
    return {
        "uid": group.prompt.uid,
        "producer_id": group.producer_id,
        "temperature": group.temperature,
        "responses": responses,
    }


def _read_groups(
    described: Sequence[dict[str, Any]], arrays: Sequence[np.ndarray], prompt_of: Callable[[str], Prompt]
) -> list[RolloutGroup]:
    ends = np.cumsum([response["num_tokens"] for group in described for response in group["responses"]], dtype=int)
    if {len(array) for array in arrays} != {int(ends[-1]) if len(ends) else 0}:
        raise ValueError("the rollouts cannot be read: arrays and responses differ in length")
    parts = zip(*(np.split(array, ends[:-1]) for array in arrays), strict=True)
    groups = []
    for number, group in enumerate(described):
        completions = tuple(
            Completion(
                **dict(zip(_ARRAYS, next(parts), strict=True)),
                finish_reason=response["finish_reason"],
                text=response["text"],
            )
            for response in group["responses"]
        )
        groups.append(
            RolloutGroup(
                lease_id=number - len(described),  # below those of the run that goes on, in the same order
                producer_id=group["producer_id"],
                prompt=prompt_of(group["uid"]),
                temperature=group["temperature"],
                completions=completions,
                scores=tuple(Score(**response["score"]) for response in group["responses"]),
            )
        )
    return groups
