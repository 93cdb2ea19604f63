"""Write and read the bodies of requests between a run and a producer that has joined it: JSON, then bytes.

A body is the length of its JSON in four bytes, the JSON, and what is no JSON: groups, weights. Nothing is pickled.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from coati_rl.batching.packed_group import PackedGroup
from coati_rl.checkpoint.untrained_rollouts import describe_packed, read_packed, route_bytes
from coati_rl.routes import routes_as_json, routes_of_json
from coati_rl.types import CommitResult, Lease, Prompt, SamplingParams
from coati_rl.work import LeaseReply

PROTOCOL = 2  # of these bodies and of the calls; both ends need the same
MAX_BODY_BYTES = 1 << 30
_LENGTH = struct.Struct("<I")
_ARRAYS = {"token_ids": "<i4", "logprobs": "<f4", "routes": "u1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """Hold the content of a body."""

    fields: Mapping[str, Any]
    payload: bytes = b""

    def to_bytes(self) -> bytes:
        """Return the body."""
        text = json.dumps(self.fields).encode()
        return b"".join((_LENGTH.pack(len(text)), text, self.payload))

    @classmethod
    def from_bytes(cls, body: bytes) -> "Frame":
        """Parse what `to_bytes` wrote. Raises: ValueError."""
        if len(body) < _LENGTH.size:
            raise ValueError("the body is cut")
        (length,) = _LENGTH.unpack_from(body)
        fields = json.loads(body[_LENGTH.size : _LENGTH.size + length])
        if not isinstance(fields, dict):
            raise ValueError("the body holds no JSON object")
        return cls(fields=fields, payload=body[_LENGTH.size + length :])


def describe_reply(reply: LeaseReply) -> dict[str, Any]:
    """Return a lease reply as JSON."""
    return asdict(reply)


def read_reply(fields: Mapping[str, Any]) -> LeaseReply:
    """Restore what `describe_reply` returned."""
    leases = tuple(_read_lease(each) for each in fields["leases"])
    return LeaseReply(**{**fields, "leases": leases, "overdue": tuple(fields["overdue"])})


def _read_lease(fields: Mapping[str, Any]) -> Lease:
    prompt, sampling = fields["prompt"], fields["sampling"]
    tuples = {"token_ids": tuple(prompt["token_ids"]), "messages": tuple(prompt["messages"])}
    return Lease(
        **{
            **fields,
            "prompt": Prompt(**{**prompt, **tuples}),
            "sampling": SamplingParams(**{**sampling, "stop": tuple(sampling["stop"])}),
        }
    )


def groups_frame(groups: Sequence[PackedGroup], **fields: Any) -> Frame:
    """Return a frame of groups: the arrays of each follow each other, int32[N], float32[M] and the bytes of routes."""
    described, payload = list[dict[str, Any]](), list[bytes]()
    for each in groups:
        arrays = (each.token_ids.astype("<i4"), each.logprobs.astype("<f4"), route_bytes(each))
        described.append({"lease_id": each.lease_id, "sizes": list(map(len, arrays)), **describe_packed(each)})
        payload += [array.tobytes() for array in arrays]
    return Frame(fields={**fields, "groups": described}, payload=b"".join(payload))


def read_groups(frame: Frame, *, producer_id: int) -> list[PackedGroup]:
    """Restore the groups of a frame, as this producer's. Raises: ValueError if arrays are missing or left over."""
    groups, at = list[PackedGroup](), 0
    for described in frame.fields["groups"]:
        arrays = dict[str, np.ndarray]()
        for (name, dtype), size in zip(_ARRAYS.items(), described["sizes"], strict=True):
            read = np.frombuffer(frame.payload, dtype, size, at)
            arrays[name] = read.astype(read.dtype.newbyteorder("="))
            at += read.nbytes
        own = {**described, "producer_id": producer_id}
        groups.append(read_packed(own, **arrays, lease_id=described["lease_id"]))
    if at != len(frame.payload):
        raise ValueError("arrays and groups differ in length")
    return groups


def commit_frame(result: CommitResult, **fields: Any) -> Frame:
    """Return a frame of a commit's result."""
    routes = None if result.probe_routes is None else routes_as_json(result.probe_routes)
    return Frame(
        fields={**fields, "seconds": result.seconds, "identities": result.identities, "probe_routes": routes},
        payload=result.probe_logprobs.astype("<f4").tobytes(),
    )


def read_commit(frame: Frame) -> CommitResult:
    """Restore what `commit_frame` holds. Raises: ValueError, KeyError or TypeError if routes are none."""
    routes = frame.fields.get("probe_routes")
    return CommitResult(
        seconds=float(frame.fields["seconds"]),
        probe_logprobs=np.frombuffer(frame.payload, "<f4").astype(np.float32),
        identities=tuple(frame.fields["identities"]),
        probe_routes=None if routes is None else routes_of_json(routes),
    )
