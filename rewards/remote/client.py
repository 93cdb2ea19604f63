"""Send groups of responses to a scoring service (`python -m rewards serve`) over HTTP and return futures of scores.

If the service does not answer in time, or not with scores, the group's scores are invalid, with the cause; they are
never zeros. `check_service` finds a wrong address, token or reward type before a run starts.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from time import monotonic

import httpx2
from pydantic import ValidationError

from coati_rl import __version__
from coati_rl.errors import ConfigError, RunError
from coati_rl.http_call import CallRefusedError, HttpCallError, call, check_url, new_client, run
from coati_rl.reward_spec import public_reward_type
from coati_rl.text import shorten
from coati_rl.types import Problem, Score
from rewards.remote.wire import TOKEN_VARIABLE, HealthReply, is_token, parse_reply, request_body
from rewards.reward import invalid_score

logger = logging.getLogger(__name__)

FLAG = "--code-verifier-api-url"
_CHECK_S = 10.0  # time limit of the check, for a service that is starting
_CLOSE_S = 5.0


class _Group:
    """Hold the request and the future of one `submit`."""

    def __init__(self, responses: Sequence[str], problem: Problem, reward_type: str | None) -> None:
        self.num_responses = len(responses)
        self.body = request_body(responses, problem, reward_type)
        self.future: Future[list[Score]] = Future()
        self.future.set_running_or_notify_cancel()  # not cancellable, as those of RewardPool


class RemoteScorer:
    """Score groups of responses with a service, many at the same time.

    Args:
        url: of the service, http://HOST:PORT.
        token: the service's secret.
        reward_type: reward type that the service must have; None: any.
        max_in_flight: largest number of concurrent requests; further groups wait.
        timeout_s: time limit of a request, retries included, in seconds; beyond it the scores are invalid. It starts
            when the request is sent.
    Raises: ConfigError for an invalid URL or token, or a size that is not positive.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str,
        reward_type: str | None = None,
        max_in_flight: int = 16,
        timeout_s: float = 300.0,
    ) -> None:
        if max_in_flight < 1 or timeout_s <= 0:
            raise ConfigError(f"max_in_flight is {max_in_flight}, timeout_s is {timeout_s:g}: both must be positive")
        self._url, self._headers = _service_url(url), _headers(token)
        self._token, self._reward_type, self._timeout_s = token, reward_type, timeout_s
        self._lock = threading.Lock()  # guards the next two
        self._is_closed = False
        self._unsettled: set[_Group] = set()
        self._is_failing = False  # the last request failed; used by the loop's thread only
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._slots = asyncio.Semaphore(max_in_flight)
        self._tasks: set[asyncio.Task[None]] = set()
        self._client: httpx2.AsyncClient | None = None  # made in the loop, by the first group
        self._thread = threading.Thread(target=self._run, name="remote-scorer", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Check this scorer's service, see `check_service`."""
        check_service(self._url, token=self._token, reward_type=self._reward_type)

    def submit(self, responses: Sequence[str], problem: Problem) -> Future[list[Score]]:
        """Score the responses of one group in the background.

        Returns: a future of one score per response, in order, resolved within `timeout_s` of sending the request. It
            fails with RunError if the scorer is closed before; it cannot be cancelled.
        Raises: RunError if the scorer is closed.
        """
        group = _Group(responses, problem, self._reward_type)
        with self._lock:
            if self._is_closed:
                raise RunError("the remote scorer is closed")
            if responses:
                self._unsettled.add(group)
                self._loop.call_soon_threadsafe(self._start, group)
        if not responses:
            group.future.set_result([])
        return group.future

    def close(self) -> None:
        """Cancel all requests. Unfinished groups fail with RunError; a second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_CLOSE_S)
        self._fail_all()

    def _run(self) -> None:
        """Run the thread. Consumes: groups. Waits for: replies, deadlines. Is unblocked by: `close`."""
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            with self._lock:
                self._is_closed = True  # also after an internal error, so that no caller waits for an ended thread
                self._loop.close()
            self._fail_all()

    async def _serve(self) -> None:
        await self._stop.wait()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    def _start(self, group: _Group) -> None:
        task = self._loop.create_task(self._score(group))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _score(self, group: _Group) -> None:
        await self._slots.acquire()  # bounded, since each earlier request has a deadline
        deadline = monotonic() + self._timeout_s
        try:
            self._client = self._client or new_client()
            body = await call(
                self._client, "POST", f"{self._url}/score", deadline=deadline, body=group.body, headers=self._headers
            )
            scores = parse_reply(body, group.num_responses)
        except (HttpCallError, ValueError) as error:
            self._note(str(error))
            scores = _invalid(group, str(error))
        except Exception as error:  # noqa: BLE001 - an internal error; the group's future must be resolved
            self._note(f"{type(error).__name__}: {shorten(error)}")
            scores = _invalid(group, f"{type(error).__name__}: {shorten(error)}")
        else:
            self._note(None)
        finally:
            self._slots.release()
        self._settle(group, scores)

    def _note(self, failure: str | None) -> None:
        """Log the first failure after a success, and the first success after a failure."""
        if failure is not None and not self._is_failing:
            logger.warning("the reward service %s fails; its responses are scored as invalid: %s", self._url, failure)
        elif failure is None and self._is_failing:
            logger.warning("the reward service %s answers again", self._url)
        self._is_failing = failure is not None

    def _settle(self, group: _Group, scores: list[Score]) -> None:
        with self._lock:
            if group not in self._unsettled:
                return
            self._unsettled.remove(group)
        group.future.set_result(scores)  # outside of the lock: it runs the caller's callbacks

    def _fail_all(self) -> None:
        with self._lock:
            groups, self._unsettled = self._unsettled, set()
        for group in groups:
            group.future.set_exception(RunError("the remote scorer was closed before these responses were scored"))


def check_service(url: str, *, token: str, reward_type: str | None = None) -> None:
    """Check within 10 s that a service is healthy, accepts the token and scores with `reward_type`.

    Raises: ConfigError with the URL, the problem and the remedy.
    """
    run(_check(_service_url(url), _headers(token), reward_type))


def token_from_environment() -> str:
    """Return the service's secret. Raises: ConfigError if the environment holds no valid one."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    _headers(token)
    return token


async def _check(url: str, headers: dict[str, str], reward_type: str | None) -> None:
    deadline = monotonic() + _CHECK_S
    try:
        async with new_client() as client:
            health = HealthReply.model_validate_json(await call(client, "GET", f"{url}/health", deadline=deadline))
            if reward_type is not None and health.reward_type != public_reward_type(reward_type):
                raise ConfigError(
                    f"{FLAG} {url}: the service scores {health.reward_type!r}, this run needs {reward_type!r}; "
                    f"start one with --type {reward_type}"
                )
            # A request without responses checks the token and costs nothing.
            probe = request_body([], Problem(ground_truth=""), reward_type)
            reply = await call(client, "POST", f"{url}/score", deadline=deadline, body=probe, headers=headers)
            parse_reply(reply, 0)
    except CallRefusedError as error:
        raise ConfigError(f"{FLAG} {url}: {error}; {_remedy(error.status)}") from error
    except (HttpCallError, ValidationError, ValueError) as error:
        raise ConfigError(
            f"{FLAG} {url}: no reward service answers there: {' '.join(str(error).split())}; "
            f"start one with python -m rewards serve, or correct the address"
        ) from error
    if health.version != __version__:
        logger.warning("the reward service %s has version %s, this run has %s", url, health.version, __version__)


def _service_url(url: str) -> str:
    if "@" in url:  # HTTP allows one Authorization header, and the address is logged
        raise ConfigError(f"{FLAG}: leave user and password out of the address; the token is in {TOKEN_VARIABLE}")
    return check_url(url, flag=FLAG).rstrip("/")


def _remedy(status: int) -> str:
    if status in (401, 403):
        return f"set {TOKEN_VARIABLE} to the token that the service was started with"
    return "give the address of a running python -m rewards serve"


def _headers(token: str) -> dict[str, str]:
    if not is_token(token):
        raise ConfigError(
            f"{FLAG} needs the token of the service: set {TOKEN_VARIABLE}, without spaces, to what the service was "
            "started with"
        )
    return {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}


def _invalid(group: _Group, reason: str) -> list[Score]:
    return [invalid_score(f"the reward service: {reason}")] * group.num_responses
