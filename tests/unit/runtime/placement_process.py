"""Take reservations in a separate Ray with 4 CPUs and no GPU, and print them as JSON; Ray reads its settings once.

Runs in a process of its own. Its argument is a directory for Ray's sockets.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from coati_rl.config import Config
from coati_rl.errors import CoatiError
from coati_rl.processes.ray_environment import prepare_ray_environment

KNOWN_S = 60.0  # until Ray's view of a node has what is reserved


def config_of(**sizes: Any) -> Config:
    return Config(model="m", dataset="d", **sizes)


def main(scratch: Path) -> None:
    config = config_of(num_trainers=2, num_inferencer=1, producer_tensor_parallel_size=2)
    prepare_ray_environment(config)
    from coati_rl.runtime import placement_manager as reservations
    from coati_rl.runtime.cluster import ray_cluster

    def refusal(device: str, **sizes: int) -> str:
        try:
            reservations.PlacementManager(config_of(**sizes), device)
        except CoatiError as error:
            return f"{type(error).__name__}: {error}"
        return "seated"

    def in_turns() -> dict[str, Any]:
        """Engines of two ranks that share the devices of four trainers."""
        sizes = {"num_trainers": 4, "num_inferencer": 2, "producer_tensor_parallel_size": 2}
        manager = reservations.PlacementManager.__new__(reservations.PlacementManager)
        shared = config_of(**sizes, colocate=True)
        manager._request = reservations.Request.of(shared, "cpu")
        seats = [{"node_id": "n", "address": "a", "group": "g", "bundle": rank, "slot": rank} for rank in range(4)]
        need = manager._request.actors["trainer"].each
        manager.trainers = [reservations.Reservation(need=need, num_slots=4, num_threads=3, **seat) for seat in seats]
        manager._free = []
        manager._share(shared)
        engines = [(each.bundle, each.slot, each.num_slots, each.num_threads, each.need.cpus) for each in manager._free]
        return {"engines": engines, "placed_alone": manager._request.actors["producer"].number}

    reservations.PLACEMENT_TIMEOUT_S = 0.0
    with ray_cluster(config, num_cpus=3, num_gpus=0, scratch=scratch):
        mine = reservations.PlacementManager(config, "cpu")
        first = mine.acquire()
        mine.release(first)
        deadline = time.monotonic() + KNOWN_S
        while reservations.cluster_nodes()[0][0].cpus and time.monotonic() < deadline:  # Ray hears of it later
            time.sleep(0.05)
        result = {
            "slots": [(reservation.slot, reservation.num_slots) for reservation in (first, *mine.trainers)],
            "cpus": [reservation.need.cpus for reservation in (first, *mine.trainers)],
            "trainers_share_a_group": mine.trainers[0].group == mine.trainers[1].group != first.group,
            "successor_has_the_same": mine.acquire() is first,
            "occupied": refusal("cpu", num_trainers=1, num_inferencer=1),
            "too_small": refusal("cpu", num_trainers=3, num_inferencer=2),
            "no_gpu": refusal("cuda", num_trainers=1, num_inferencer=1),
            "in_turns": in_turns(),
            "address": mine.trainers[0].address,
            "dead_raylets_before": mine.dead_raylets(),
        }
        raylet = next(child for child in psutil.Process().children() if child.name() == "raylet")
        raylet.kill()
        raylet.wait()
        result["dead_raylets"] = mine.dead_raylets()
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
