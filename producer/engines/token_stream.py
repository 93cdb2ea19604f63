"""Send the tokens of a request to a listener as they are sampled.

In: new tokens of a sample, on the engine's thread. Out: `TokenChunk`s; those of a sample, in order, are its completion.
"""

import logging
from collections.abc import Sequence

import numpy as np

from coati_rl.protocols import OnTokens
from coati_rl.types import TokenChunk

logger = logging.getLogger(__name__)


class TokenStream:
    """Call one request's listener; after an exception, which is logged, it is not called again."""

    def __init__(self, request_id: str, on_tokens: OnTokens) -> None:
        self._request_id = request_id
        self._on_tokens: OnTokens | None = on_tokens

    def send(self, index: int, token_ids: Sequence[int], logprobs: Sequence[float], policy_version: int) -> None:
        """Send new tokens of sample `index`, all sampled by one policy_version; without tokens nothing is sent."""
        if self._on_tokens is None or not token_ids:
            return
        chunk = TokenChunk(
            request_id=self._request_id,
            index=index,
            token_ids=np.asarray(token_ids, dtype=np.int32),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            policy_versions=np.full(len(token_ids), policy_version, dtype=np.int32),
        )
        try:
            self._on_tokens(chunk)
        except Exception:
            logger.exception("request %s: its token listener raised an error and is not called again", self._request_id)
            self._on_tokens = None
