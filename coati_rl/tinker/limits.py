"""Define the limits of a server of Tinker's API, and who its keys belong to."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from coati_rl.tinker.api_error import ApiError

ANYONE = "anyone"  # owner of all requests, where no keys are set
KEY_PREFIX = "tml-"  # its client refuses others


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Say what a server, and each key, may use."""

    max_models: int = 32  # of a key at a time
    max_checkpoint_bytes: int = 2**40  # of a key's checkpoints
    max_in_flight: int = 8192  # requests of a key that are not answered
    max_body_bytes: int = 2**28  # of a request, decompressed
    batch_tokens: int = 65536  # of the requests that are computed in one call, if they are several
    session_timeout_s: float = 600.0  # without a heartbeat; clients send one every 10 s
    gap_timeout_s: float = 600.0  # that requests wait for an earlier one of their model
    keep_answers_s: float = 600.0  # after they were retrieved
    poll_s: float = 20.0  # of a call for an answer; clients end it at 45 s
    save_steps: int = 16  # optimizer steps between automatic checkpoints of a model
    save_bytes: int = 2**26  # of requests since one, after which the next step makes another
    max_published: int = 32  # samplers in an engine's memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """Tell a key's owner."""

    owners: Mapping[str, str] = field(default_factory=dict)  # by key; empty: all keys are ANYONE's

    def owner(self, key: str) -> str:
        """Return the owner of a key. Raises: ApiError of status 401."""
        if not self.owners:
            return ANYONE
        given, found = key.encode("utf-8", "surrogateescape"), None
        for each, owner in self.owners.items():  # all are compared, in constant time
            if hmac.compare_digest(given, each.encode()):
                found = owner
        if found is None:
            raise ApiError(
                401, "this key is not one of the server's: set TINKER_API_KEY to a key of its --key NAME=KEY"
            )
        return found
