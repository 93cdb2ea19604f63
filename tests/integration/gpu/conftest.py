"""Provide trainers and runs on GPUs, real or emulated ones."""

from collections.abc import Iterator

import pytest

from tests.integration.consumer.trainer_server import TrainerServers
from tests.integration.engines.conftest import checkpoints  # noqa: F401  (this and the following: fixtures)
from tests.integration.runs.conftest import flags, make_tiny, run_class, start_run  # noqa: F401
from tests.integration.runs.test_offline import job_flags, rows  # noqa: F401


@pytest.fixture(scope="session")
def gpu_trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerServers]:
    servers = TrainerServers(tmp_path_factory.mktemp("gpu-trainers"), "cuda")
    yield servers
    servers.close()
