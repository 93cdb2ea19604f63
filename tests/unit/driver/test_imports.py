"""Test that processes which compute nothing do without torch, whose memory stays as long as they run."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import coati_rl.driver.coordinator_actors, coati_rl.driver.launch, coati_rl.runtime.actor_group
from coati_rl.config import Config
from consumer.actor import TrainerActor
from consumer.scorer import ScorerActor
from producer.actor import ProducerActor
TrainerActor.environment(Config(), "cpu")
ScorerActor.environment(Config(), "cpu")
ProducerActor.environment(Config(), "cpu")
import coati_rl.preflight.prepared_run, consumer.parallel.store_location
print([name for name in ("torch", "transformers", "vllm", "colossalai") if name in sys.modules])
"""


@pytest.mark.full
def test_the_driver_and_the_coordinator_import_no_engine():
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]"
