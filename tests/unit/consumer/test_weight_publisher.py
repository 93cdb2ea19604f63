"""Weight syncs from the heads of the pipeline stages to producers, over gloo between threads."""

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from coati_rl.errors import EngineError, PeerLostError, RunError, TransferError
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.transport.wire import WeightSender
from coati_rl.work import SyncWork
from consumer.weight_sync.publisher import MAX_ATTEMPTS, StageSender
from tests.unit.consumer.publishing import STAGES, Export, Producer, Run, digest_of


@pytest.fixture
def start_run() -> Iterator[Callable[[int], Run]]:
    runs: list[Run] = []

    def start(num_stages: int) -> Run:
        runs.append(Run(num_stages))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_every_producer_serves_all_stages_and_the_report_has_the_digest_of_the_whole_stream(start_run, num_stages):
    run = start_run(num_stages)
    for version in (1, 2):
        report = run.sync(version)
        assert (report.index, report.staged, report.failed) == (version, (0, 1), {})
        assert report.digest == digest_of(STAGES)
        for producer in run.producers.values():
            assert producer.version == version
            assert list(producer.serves) == ["embed", "layer0", "layer1", "layer2", "head"]
            assert all(torch.equal(producer.serves[name], tensor) for share in STAGES for name, tensor in share)


def test_a_group_goes_on_as_long_as_its_members_stay_and_the_other_heads_are_told_of_each_new_one(start_run):
    run = start_run(3)
    for version, members in enumerate([(0, 1), (0, 1), (1,), (1,)], start=1):
        assert run.sync(version, members=members).staged == members
    assert [len(order["rendezvous"]) for order in run.announced] == [2, 0, 2, 0]
    invitations = [Rendezvous.from_json(text) for text in run.announced[0]["rendezvous"]]
    assert [(invitation.first_rank, invitation.world_size) for invitation in invitations] == [(1, 5), (2, 5)]


def test_a_transfer_that_one_producer_refuses_is_repeated_in_a_new_group(start_run):
    run = start_run(3)
    assert run.sync(1).staged == (0, 1)
    run.producers[1].faults = [TransferError("out of memory")]
    report = run.sync(2)
    assert (report.staged, report.failed) == ((), {})
    assert {producer.version for producer in run.producers.values()} == {1}
    assert run.sync(2).staged == (0, 1)
    assert [len(order["rendezvous"]) for order in run.announced] == [2, 0, 2]


def test_a_producer_that_is_gone_is_reported_and_the_others_keep_their_weights(start_run):
    run = start_run(2)
    run.producers[1].faults = [PeerLostError("producer-1 died")]
    report = run.sync(1)
    assert (report.staged, report.failed) == ((), {1: "producer-1 died"})
    assert run.sync(1, members=(0,)).staged == (0,)


def test_a_producer_whose_engine_died_is_to_be_replaced_and_not_to_be_asked_again(start_run):
    run = start_run(1)
    run.producers[1].faults = [EngineError("the engine died: out of memory")]
    report = run.sync(1)
    assert (report.staged, report.failed) == ((), {1: "the engine died: out of memory"})
    assert report.problem == "producer 1: the engine died: out of memory"


def test_a_producer_that_dies_when_it_has_received_all_keeps_the_others_from_committing(start_run, monkeypatch):
    run = start_run(1)
    stage = run.producers[1].stage_weights

    def stage_and_die(*args: object, **options: object) -> None:
        stage(*args, **options)
        time.sleep(0.3)  # the transfer has ended well for everyone
        raise PeerLostError("producer-1 died")

    monkeypatch.setattr(run.producers[1], "stage_weights", stage_and_die)
    report = run.sync(1)
    assert (report.staged, report.failed) == ((), {1: "producer-1 died"})
    assert run.producers[0].version == 0
    assert run.sync(1, members=(0,)).staged == (0,)


def test_a_producer_that_cannot_even_be_connected_to_is_reported_likewise(start_run):
    run = start_run(2)

    def connect(producer: int) -> Producer:
        if producer == 1:
            raise PeerLostError("producer-1 is gone")
        return run.producers[producer]

    run.publisher = run.make_publisher(connect=connect)
    report = run.sync(1)
    assert (report.staged, report.failed) == ((), {1: "producer-1 is gone"})


def test_each_producers_commit_is_reported_with_its_answer_to_the_probe(start_run):
    run = start_run(1)
    run.sync(1)
    assert {number: commit.error for number, commit in run.commits.items()} == {0: None, 1: None}
    assert [commit.result.probe_logprobs.tolist() for commit in run.commits.values()] == [[6.0, 7.0]] * 2


def test_a_commit_that_fails_is_reported_with_its_cause_and_the_other_producer_serves(start_run):
    run = start_run(1)
    run.producers[0].commit_faults = [EngineError("3 requests still run after 20 s")]
    assert run.sync(1).staged == (0, 1)
    assert (run.commits[0].error, run.commits[0].result) == ("3 requests still run after 20 s", None)
    assert run.commits[1].error is None and run.producers[1].version == 1


@pytest.mark.parametrize("broken_stage", [0, 1, 2])
def test_weights_that_are_not_finite_are_committed_nowhere_and_every_export_is_iterated_to_its_end(
    start_run, broken_stage
):
    run = start_run(3)
    exports = run.exports()
    name, tensor = STAGES[broken_stage][0]
    exports[broken_stage] = Export([(name, tensor * float("nan")), *STAGES[broken_stage][1:]])
    report = run.sync(1, exports=exports)
    assert (report.staged, report.failed, report.digest) == ((), {}, "")
    assert [export.num_yielded for export in exports] == [2, 2, 1]
    assert run.sync(1).staged == (0, 1)


def test_an_error_in_the_export_of_another_stage_is_raised_there_and_fails_the_sync_here(start_run, caplog):
    run = start_run(2)
    exports = [Export(run.stages[0]), Export(run.stages[1], fails_with=ZeroDivisionError("in stage 1"))]
    (other,) = run.start_others(exports)
    report = run.publish(1, exports[0])
    assert (report.staged, report.failed) == ((), {})
    assert exports[0].is_at_end
    assert "rank 1 gave up: ZeroDivisionError: in stage 1" in caplog.text
    with pytest.raises(ZeroDivisionError):
        other.result(20.0)


def test_an_error_in_the_export_of_rank_0_is_raised_here_and_frees_the_other_heads(start_run):
    run = start_run(2)
    exports = [Export(run.stages[0], fails_with=ZeroDivisionError("in stage 0")), Export(run.stages[1])]
    (other,) = run.start_others(exports)
    with pytest.raises(ZeroDivisionError):
        run.publisher.publish(SyncWork(index=1, policy_version=1, members=(0, 1)), iter(exports[0]))
    assert other.result(20.0) is None
    assert exports[1].is_at_end


def test_an_export_is_iterated_to_its_end_even_if_nothing_can_be_sent(start_run):
    run = start_run(1)

    def refuse(version: int) -> WeightManifest:
        raise ValueError(f"no manifest of version {version}")

    export = Export(run.stages[0])
    with pytest.raises(ValueError, match="no manifest of version 3"):
        run.make_publisher(make_manifest=refuse).publish(
            SyncWork(index=0, policy_version=3, members=(0,)), iter(export)
        )
    assert export.is_at_end


@pytest.mark.parametrize("text", ["", "{}", '{"manifest": "", "rendezvous": [], "timeout_s": 1.0}'])
def test_an_announcement_that_is_none_is_refused_after_the_export_was_iterated_to_its_end(text):
    export = Export(STAGES[1])
    with pytest.raises(TransferError):
        StageSender(WeightSender(), lambda: text, rank=1).take_part(iter(export))
    assert export.is_at_end


def test_syncs_that_fail_without_anyone_being_gone_end_the_run(start_run):
    run = start_run(2)
    run.producers[0].faults = [TransferError("out of memory")] * MAX_ATTEMPTS
    for _ in range(MAX_ATTEMPTS - 1):
        assert run.sync(1).staged == ()
    exports = run.exports()
    others = run.start_others(exports)
    with pytest.raises(
        RunError, match=f"weight sync to version 1 failed {MAX_ATTEMPTS} times: producer 0: out of memory"
    ):
        run.publisher.publish(SyncWork(index=1, policy_version=1, members=(0, 1)), iter(exports[0]))
    assert others[0].result(20.0) is None
    assert all(export.is_at_end for export in exports)


def test_a_producer_with_another_digest_ends_the_run(start_run, monkeypatch):
    run = start_run(2)
    stage = run.producers[1].stage_weights
    monkeypatch.setattr(run.producers[1], "stage_weights", lambda *a, **k: (*stage(*a, **k), "00ff"))
    exports = run.exports()
    run.start_others(exports)
    with pytest.raises(RunError, match=r"producer 1 received .*00ff.* a corrupt transfer"):
        run.publisher.publish(SyncWork(index=1, policy_version=1, members=(0, 1)), iter(exports[0]))
    assert {producer.version for producer in run.producers.values()} == {0}
