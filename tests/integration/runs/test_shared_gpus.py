"""Test which GPUs engines get that share those of trainers, with a Ray that believes to have four."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from coati_rl.config import Config
from coati_rl.processes.ray_environment import prepare_ray_environment

engines, width = int(sys.argv[1]), int(sys.argv[2])
config = Config(num_trainers=4, num_inferencer=engines, producer_tensor_parallel_size=width, colocate=True)
prepare_ray_environment(config)
import ray
from coati_rl.runtime.cluster import ray_cluster
from coati_rl.runtime.placement_manager import PlacementManager


class Actor:
    def gpus(self):
        return [int(each) for each in ray.get_gpu_ids()]


with (
    TemporaryDirectory(dir="/tmp") as scratch,  # the paths of Ray's sockets are short
    ray_cluster(config, num_cpus=8, num_gpus=4, scratch=Path(scratch)),
):
    places = PlacementManager(config, "cuda")
    engines = [places.acquire() for _ in range(config.num_producers)]
    actors = [
        ray.remote(Actor).options(
            num_cpus=each.need.cpus, num_gpus=each.need.gpus, scheduling_strategy=each.strategy
        ).remote()
        for each in (*places.trainers, *engines)
    ]
    print(json.dumps([[each.gpus for each in engines], ray.get([actor.gpus.remote() for actor in actors], timeout=60)]))
"""


@pytest.mark.full
@pytest.mark.parametrize(("engines", "width"), [(4, 1), (2, 2), (1, 2)])
def test_an_engine_has_the_gpus_of_its_trainers_and_asks_ray_for_none(engines: int, width: int) -> None:
    arguments = [sys.executable, "-c", PROGRAM, str(engines), str(width)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shared, given = json.loads(done.stdout.splitlines()[-1])
    trainers, others = [gpu for gpus in given[:4] for gpu in gpus], given[4:]
    assert sorted(trainers) == [0, 1, 2, 3]
    assert shared == [trainers[place * width : (place + 1) * width] for place in range(engines)]
    assert others == [[]] * engines
