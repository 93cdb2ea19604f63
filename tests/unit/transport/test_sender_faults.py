"""Test that every member gets an error in time when one of several senders fails, dies, stalls or never joins."""

import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from coati_rl.errors import TransferError, TransferTimeoutError
from tests.unit.transport.peer import big_weights
from tests.unit.transport.receivers import Receivers
from tests.unit.transport.senders import OtherSenders, announce
from tests.unit.transport.test_wire_faults import takes

# The files of one transfer are written and awaited as in that of a receiver's faults, which has them in the fast suite.
pytestmark = pytest.mark.parametrize("backend", ["gloo", "shm", pytest.param("file", marks=pytest.mark.full)])
WEIGHTS = big_weights()  # of 8 MiB each
STAGES = [WEIGHTS[:3], WEIGHTS[3:]]
MANIFEST = announce(STAGES, bucket_bytes=2**19)  # each in 16 buckets


def failures(futures) -> list[str]:
    """Return the errors of all members."""
    errors = [future.exception(timeout=60.0) for future in futures]
    assert all(isinstance(error, TransferError) for error in errors)
    return [str(error) for error in errors]


def test_the_error_of_a_sender_reaches_every_other_member(sender):
    receivers = Receivers(sender.open([1, 1], num_senders=3), [1, 1])
    others = OtherSenders(sender.sender_invitations)
    stages = [WEIGHTS[:2], WEIGHTS[2:4], WEIGHTS[4:]]
    manifest = announce(stages, bucket_bytes=2**19)

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        yield stages[1][0]
        raise ZeroDivisionError("in stage 1")

    receiving = receivers.start(manifest, timeout_s=60.0)
    sending = others.start(manifest, [gather(), stages[2]], timeout_s=60.0)
    with takes(0.0), pytest.raises(TransferError, match="rank 1 gave up: ZeroDivisionError: in stage 1"):
        sender.send(manifest, stages[0], timeout_s=60.0)
    with takes(0.0):
        assert isinstance(sending[0].exception(timeout=60.0), ZeroDivisionError)
        for message in failures([*receiving, sending[1]]):
            assert "rank 0 gave up: " in message
            assert "rank 1 gave up: ZeroDivisionError: in stage 1" in message
    assert [other.is_open for other in (sender, *others.senders)] == [False, False, False]


def test_the_error_of_rank_0_reaches_the_other_senders(sender):
    receivers = Receivers(sender.open([1], num_senders=2), [1])
    others = OtherSenders(sender.sender_invitations)

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        yield STAGES[0][0]
        raise ZeroDivisionError("in stage 0")

    futures = [*receivers.start(MANIFEST, timeout_s=60.0), *others.start(MANIFEST, STAGES[1:], timeout_s=60.0)]
    with takes(0.0), pytest.raises(ZeroDivisionError):
        sender.send(MANIFEST, gather(), timeout_s=60.0)
    assert all("rank 0 gave up: ZeroDivisionError: in stage 0" in message for message in failures(futures))
    assert not others.senders[0].is_open


@pytest.fixture
def second_sender(sender, spawn_peer):
    """A process that has sent its share of one update and is about to send the next; and the engines' rank."""
    receivers = Receivers(sender.open([1], num_senders=2), [1])
    peer = spawn_peer("join", sender.sender_invitations[0].to_json(), MANIFEST.to_json(), "60")
    (future,) = receivers.start(MANIFEST, timeout_s=60.0)
    digest = sender.send(MANIFEST, STAGES[0], timeout_s=60.0)
    assert peer.stdout.readline().strip() == digest == future.result(60.0).digest
    return peer, receivers


@pytest.mark.sampled(2)
def test_a_sender_that_died_ends_the_transfer_for_everyone_at_once(sender, second_sender):
    peer, receivers = second_sender
    peer.kill()
    peer.wait()
    (receiving,) = receivers.start(MANIFEST, timeout_s=60.0)
    with takes(0.0), pytest.raises(TransferError, match=r"rank 0 of 3, .* rank 1 died"):
        sender.send(MANIFEST, STAGES[0], timeout_s=60.0)
    with takes(0.0):
        (message,) = failures([receiving])
    assert "rank 0 gave up: " in message
    assert "rank 1 died" in message


@pytest.mark.sampled(2)
def test_a_sender_that_dies_when_it_is_its_turn_does_too(sender, second_sender):
    peer, receivers = second_sender
    peer.send_signal(signal.SIGSTOP)
    threading.Timer(1.0, peer.kill).start()
    (receiving,) = receivers.start(MANIFEST, timeout_s=60.0)
    with takes(1.0), pytest.raises(TransferError, match=r"rank 0 of 3, .* rank 1 died") as caught:
        sender.send(MANIFEST, STAGES[0], timeout_s=60.0)
    assert not isinstance(caught.value, TransferTimeoutError)
    with takes(0.0):
        (message,) = failures([receiving])
    assert "rank 1 died" in message


@pytest.mark.sampled(2)
def test_a_sender_that_stalls_ends_the_transfer_for_everyone_at_the_deadline(sender, second_sender):
    peer, receivers = second_sender
    peer.send_signal(signal.SIGSTOP)
    (receiving,) = receivers.start(MANIFEST, timeout_s=60.0)
    with takes(1.5), pytest.raises(TransferTimeoutError, match=r"rank 0 of 3, .* not done within 1.5 s"):
        sender.send(MANIFEST, STAGES[0], timeout_s=1.5)
    with takes(0.0):
        (message,) = failures([receiving])
    assert "rank 0 gave up: " in message


@pytest.mark.sampled(2)
def test_a_sender_that_hangs_over_its_tensors_is_named_by_rank_and_tensor(sender):
    receivers = Receivers(sender.open([1], num_senders=2), [1])
    others = OtherSenders(sender.sender_invitations)
    release = threading.Event()

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        yield STAGES[1][0]
        release.wait()
        yield from STAGES[1][1:]

    (receiving,) = receivers.start(MANIFEST, timeout_s=60.0)
    (sending,) = others.start(MANIFEST, [gather()], timeout_s=60.0)
    waited_for = r"receiving bucket 65 of 96 of version 1 \(first tensor: 'layer4'\) from rank 1: not done within 1.5 s"
    with takes(1.5), pytest.raises(TransferTimeoutError, match=f"rank 0 of 3, {waited_for}"):
        sender.send(MANIFEST, STAGES[0], timeout_s=1.5)
    assert "'layer4'" in failures([receiving])[0]
    release.set()
    assert "rank 0 gave up: " in failures([sending])[0]  # as soon as it comes back


def test_a_sender_that_never_joins_is_named_on_every_other_member(sender):
    receivers = Receivers(sender.open([1], num_senders=3), [1])
    others = OtherSenders(sender.sender_invitations[1:])
    (receiving,) = receivers.start(MANIFEST, timeout_s=60.0)
    (sending,) = others.start(MANIFEST, STAGES[1:], timeout_s=60.0)
    with takes(1.0), pytest.raises(TransferTimeoutError, match="rank 0 of 4, joining: waiting for rank 1: not done"):
        sender.send(MANIFEST, STAGES[0], timeout_s=1.0)
    assert all("rank 0 gave up: rank 0 of 4, joining: waiting for rank 1" in m for m in failures([receiving, sending]))


@pytest.mark.full
def test_cancelling_on_rank_0_ends_the_transfer_for_everyone(sender, second_sender):
    peer, receivers = second_sender
    peer.send_signal(signal.SIGSTOP)
    (receiving,) = receivers.start(MANIFEST, timeout_s=60.0)
    threading.Timer(0.5, sender.cancel).start()
    with takes(0.5), pytest.raises(TransferError, match="cancelled"):
        sender.send(MANIFEST, STAGES[0], timeout_s=60.0)
    assert "cancelled" in failures([receiving])[0]


@pytest.mark.sampled(2)
def test_an_engine_that_dies_ends_the_transfer_for_the_sender_whose_turn_it_is(sender, spawn_peer):
    (invitation,) = sender.open([1], num_senders=2)
    others = OtherSenders(sender.sender_invitations)
    peer = spawn_peer("receive", invitation.to_json(), MANIFEST.to_json(), "60")
    (sending,) = others.start(MANIFEST, STAGES[1:], timeout_s=60.0)
    digest = sender.send(MANIFEST, STAGES[0], timeout_s=60.0)
    assert peer.stdout.readline().strip() == digest == sending.result(60.0)

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        yield STAGES[1][0]
        peer.send_signal(signal.SIGSTOP)
        threading.Timer(0.5, peer.kill).start()
        yield from STAGES[1][1:]

    (sending,) = others.start(MANIFEST, [gather()], timeout_s=60.0)
    with takes(0.5), pytest.raises(TransferError, match=r"rank 0 of 3, .*rank 2") as caught:
        sender.send(MANIFEST, STAGES[0], timeout_s=60.0)
    assert not isinstance(caught.value, TransferTimeoutError)
    with takes(0.0):
        assert "rank 0 gave up: " in failures([sending])[0]


@pytest.mark.full
def test_after_a_failure_a_new_group_works(sender, second_sender):
    peer, _ = second_sender
    peer.kill()
    peer.wait()
    with pytest.raises(TransferError):
        sender.send(MANIFEST, STAGES[0], timeout_s=60.0)
    receivers = Receivers(sender.open([1], num_senders=2), [1])
    others = OtherSenders(sender.sender_invitations)
    (receiving,), (sending,) = receivers.start(MANIFEST), others.start(MANIFEST, STAGES[1:])
    digest = sender.send(MANIFEST, STAGES[0], timeout_s=60.0)
    assert digest == sending.result(20.0) == receiving.result(20.0).digest
