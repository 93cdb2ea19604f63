"""Test runs whose engines are real servers of vLLM and SGLang that were started before them."""

from collections import Counter

import pytest

from tests.integration.engines.sglang_server import sglang_server
from tests.integration.engines.vllm_server import vllm_server
from tests.integration.runs.records import assert_complete, assert_engine_and_trainer_agree, lines, read_rollouts

pytestmark = pytest.mark.full
NUM_STEPS = 4
PASSES, NUM_PROMPTS, PER_STEP, GROUP_SIZE = 2, 160, 8, 4  # of the run with two servers
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


def test_with_sglang_every_sync_is_proved_and_its_log_probabilities_are_the_trainers(start, model, tmp_path):
    with sglang_server(model, tmp_path / "log", max_model_len=1024) as server:
        run = start(server.url)
        assert_engine_and_trainer_agree(assert_complete(run, steps=NUM_STEPS))
    syncs = lines(run.run_dir / "syncs.jsonl")
    assert len(syncs) == NUM_STEPS + 1
    assert all(sync["probe_gap_max"] < ROUNDING for sync in syncs), "every one is probed"


def test_a_server_that_is_killed_is_named_and_the_run_ends(model, start, tmp_path):
    with vllm_server(model, tmp_path / "log", max_model_len=1024) as server:
        run = start(server.url, "--max-steps", 500)
        run.wait_for_step(2)
        server.kill()
        assert run.wait() == 1, run.text()
    assert server.url in run.text()


def test_of_two_servers_one_is_killed_and_the_other_samples_its_prompts(model, server, flags, start_run, tmp_path):
    with vllm_server(model, tmp_path / "log", max_model_len=1024) as killed:
        job = [*flags(model, inferencers=2), "-b", f"{server.url},{killed.url}", "-mpt", 512, "-nb", 1, "-e", PASSES]
        run = start_run(*job)
        run.wait_for_step(3)
        killed.kill()
        lost_after = len(run.records())
        records = assert_complete(run, steps=PASSES * NUM_PROMPTS // PER_STEP)
    lost = {line.split()[1] for line in run.text().splitlines() if " lost: " in line and killed.url in line}
    assert len({"0", "1"} - lost) == 1, run.text()  # one whose server did not come back is lost, too
    assert "prompts reissued" in run.text() and server.url not in run.text().partition(" lost: ")[2]
    trained = [line for line in read_rollouts(run) if line["is_trained"]]
    assert {*Counter((line["uid"], line["sample"]) for line in trained).values()} == {1}, "none twice"
    passes = Counter(line["uid"].rpartition(".")[2] for line in trained)
    assert passes == {str(number): NUM_PROMPTS * GROUP_SIZE for number in range(PASSES)}, "none lost"
    assert {line["producer"] for line in trained if line["step"] <= lost_after} == {0, 1}
    assert {str(line["producer"]) for line in trained if line["step"] > lost_after + 2} == {"0", "1"} - lost
    assert all(record["staleness_max"] <= 1 for record in records)
    assert all(sync["probe_gap_max"] < ROUNDING for sync in lines(run.run_dir / "syncs.jsonl"))
