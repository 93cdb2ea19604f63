"""Test runs whose engines are real vLLM servers that were started before them."""

import pytest

from tests.integration.engines.vllm_server import vllm_server
from tests.integration.runs.records import assert_complete, assert_engine_and_trainer_agree, lines, read_rollouts

pytestmark = pytest.mark.full
NUM_STEPS = 4
ROUNDING = 1e-5  # nats, of a probe in float32


@pytest.fixture(scope="module")
def model(make_tiny):
    return make_tiny(tied=False)  # the CPU build of vLLM loads other heads again only with this project's loader


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with vllm_server(model, tmp_path_factory.mktemp("server") / "log", max_model_len=1024) as server:
        yield server


@pytest.fixture
def start(model, start_run, flags):
    """Run so many steps with the engines of -b."""

    def start(backend, *others, inferencers=1):
        job = flags(model, inferencers=inferencers)
        return start_run(*job, "-b", backend, "-mpt", 512, "--max-steps", NUM_STEPS, *others, name=backend[:4])

    return start


def test_it_samples_the_tokens_of_an_engine_of_its_own_and_every_sync_is_proved(server, start):
    runs = [start(backend) for backend in (server.url, "vllm")]
    for run in runs:
        assert_engine_and_trainer_agree(assert_complete(run, steps=NUM_STEPS))
        syncs = lines(run.run_dir / "syncs.jsonl")
        assert len(syncs) == NUM_STEPS + 1
        assert all(sync["probe_gap_max"] < ROUNDING for sync in syncs), "every one is probed"
        assert not (run.run_dir / "engine_weights").exists() or not [*(run.run_dir / "engine_weights").rglob("*.*")]
    by_url, own = (
        [(line["uid"], line["sample"], line["token_ids"]) for line in sorted(read_rollouts(run), key=_place)]
        for run in runs
    )
    assert by_url == own


def _place(line):
    return line["step"], line["uid"], line["sample"]


def test_a_server_that_is_killed_is_named_and_the_run_ends(model, start, tmp_path):
    with vllm_server(model, tmp_path / "log", max_model_len=1024) as server:
        run = start(server.url, "--max-steps", 500)
        run.wait_for_step(2)
        server.kill()
        assert run.wait() == 1, run.text()
    assert server.url in run.text()
