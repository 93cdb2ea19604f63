"""Ask actors of Ray for heartbeats, and end their processes on other nodes."""

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from coati_rl.errors import PeerLostError
from coati_rl.processes.hangs import HangTimeouts
from coati_rl.processes.heartbeats import Heartbeat, Heartbeats, end_process, own_heartbeat
from coati_rl.runtime.waits import ready


def ray_heartbeats(timeouts: HangTimeouts) -> Heartbeats:
    """Return the heartbeats of a run's actors, for its driver."""
    return Heartbeats(timeouts, ask=_ask, answer=_answer, here=_node_id(), end_there=_end_there)


def actor_heartbeat() -> Heartbeat:
    """Return the heartbeat of the calling actor."""
    return own_heartbeat(_node_id())


def _node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _ask(handle: Any) -> Any:
    return handle.beat.remote()


def _answer(reference: Any) -> Heartbeat | None:
    try:
        beat: Heartbeat = ray.get(reference, timeout=0)
    except GetTimeoutError:
        return None
    except RayError as error:
        raise PeerLostError(str(error)) from error
    return beat


def _end_there(beat: Heartbeat) -> Callable[[float], object]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(beat.node_id, soft=False)
    task: Any = ray.remote(end_process).options(num_cpus=0, scheduling_strategy=there)
    reference = task.remote(beat.pid, beat.started_at)  # the node may be lost
    return lambda timeout_s: ready([reference], timeout_s=timeout_s)
