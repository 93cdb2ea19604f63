"""Give each episode a URL and a token, and find the session that a request may use.

A token is compared in constant time. It opens the URL of its own episode alone: another's is answered with 403, a token
that is none with 401. After the end of an episode its URL is answered with 503.
"""

import hmac
import json
import math
import secrets
from collections import deque
from dataclasses import dataclass
from typing import Annotated, Protocol

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from coati_rl.types import MAX_REWARD
from producer.environments.returned_steps import ONE_REWARD, is_encodable
from producer.gateway.api_error import ApiError
from producer.gateway.app import BodyLimits, read_body
from producer.gateway.session import Session

PREFIX = "/episodes/{episode}/v1"
_NUM_ENDED = 1024  # episodes whose tokens are remembered after their end
_MAX_NAME = 64  # characters


class RewardSink(Protocol):
    """Take the rewards of an episode."""

    def add_reward(self, name: str, value: float) -> None:
        """Add a reward at the last answer. Raises: ApiError(400) if there is none yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """Hold an episode that clients may use."""

    episode_id: str
    token: str
    session: Session
    rewards: RewardSink


class EpisodeTable:
    """Hold the episodes that are open; the gateway's event loop uses it."""

    def __init__(self) -> None:
        self._open: dict[str, Registered] = {}
        self._ended: deque[tuple[str, str]] = deque(maxlen=_NUM_ENDED)  # id and token

    def register(self, session: Session, rewards: RewardSink) -> Registered:
        """Open an episode, with an id and a token that cannot be guessed."""
        registered = Registered(
            episode_id=secrets.token_hex(8), token=secrets.token_urlsafe(32), session=session, rewards=rewards
        )
        self._open[registered.episode_id] = registered
        return registered

    def end(self, registered: Registered) -> None:
        """End an episode: its calls in flight are aborted, further ones refused."""
        registered.session.close()
        del self._open[registered.episode_id]
        self._ended.append((registered.episode_id, registered.token))

    def find(self, request: Request) -> Registered:
        """Return the episode of a request's path. Raises: ApiError if its token is not that of the episode."""
        token, wanted = bearer_token(request), str(request.path_params["episode"])
        found = self._open.get(wanted)
        if found is not None and hmac.compare_digest(token, found.token.encode()):
            return found
        if any(hmac.compare_digest(token, ended.encode()) for name, ended in self._ended if name == wanted):
            raise ApiError(503, "the episode has ended", code="episode_ended", is_final=True)
        others = [*(other.token for other in self._open.values()), *(ended for _, ended in self._ended)]
        if any(hmac.compare_digest(token, other.encode()) for other in others):
            raise ApiError(403, "the token is that of another episode: use the base URL that it was given with")
        raise wrong_token(token)


def bearer_token(request: Request) -> bytes:
    """Return the token of the authorization header; empty if there is none."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip().encode() if scheme.lower() == "bearer" else b""


def wrong_token(token: bytes) -> ApiError:
    """Return the refusal of a token that is none."""
    problem = "wrong API key" if token else "no API key"
    return ApiError(401, f'{problem}: send "Authorization: Bearer KEY"', code="invalid_api_key")


def reward_router(table: EpisodeTable, limits: BodyLimits) -> APIRouter:
    """Return the route by which an agent reports rewards: {"reward": number, "name"?: text}."""
    router = APIRouter()

    async def registered(request: Request) -> Registered:
        return table.find(request)

    @router.post("/episodes/{episode}/reward")
    @router.post(f"{PREFIX}/reward")
    async def reward(request: Request, found: Annotated[Registered, Depends(registered)]) -> Response:
        name, value = _reward_of(await read_body(request, limits))
        found.session.check_open()
        found.rewards.add_reward(name, value)
        return JSONResponse({"reward": value, "name": name})

    return router


def _reward_of(body: bytes) -> tuple[str, float]:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(values, dict) or values.keys() - {"reward", "name"}:
        raise ApiError(400, 'the body: needs {"reward": number, "name"?: text}, and nothing else')
    value, name = values.get("reward"), values.get("name", ONE_REWARD)
    if not isinstance(value, int | float) or abs(value) > MAX_REWARD or not math.isfinite(value):
        raise ApiError(400, f"reward: needs a number of at most {MAX_REWARD:g}", param="reward", code="invalid_value")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not is_encodable(name):
        raise ApiError(400, f"name: needs a text of at most {_MAX_NAME} characters", param="name", code="invalid_value")
    return name, float(value)
