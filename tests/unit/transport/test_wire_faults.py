"""Test that each end gets an error with peer and cause in time when peers die, stall or never join."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from coati_rl.errors import TransferError, TransferTimeoutError
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.group import join_group
from coati_rl.transport.manifest import WeightManifest, build_manifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.transport.staging_memory import HostMemory
from coati_rl.transport.wire import receive
from tests.unit.transport.peer import big_weights
from tests.unit.transport.receivers import CPU, Receivers

WEIGHTS = big_weights()
SLACK_S = 10.0  # the machine may be busy; a hang would be the 60 s that the transfers are allowed


@contextmanager
def takes(at_least_s: float, *, slack_s: float = SLACK_S) -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert at_least_s <= time.monotonic() - begin < at_least_s + slack_s


@pytest.fixture
def receiver(sender, spawn_peer):
    """A process that has received one update and waits for the next."""
    manifest = build_manifest(WEIGHTS, policy_version=1, bucket_bytes=2**19)
    (invitation,) = sender.open([1])
    peer = spawn_peer("receive", invitation.to_json(), manifest.to_json(), "60")
    digest = sender.send(manifest, WEIGHTS, timeout_s=60.0)
    assert peer.stdout.readline().strip() == digest
    return peer, manifest


def test_a_receiver_that_died_ends_the_senders_transfer_at_once(sender, receiver):
    peer, manifest = receiver
    peer.kill()
    peer.wait()
    with takes(0.0), pytest.raises(TransferError, match=r"rank 0 of 2, .* rank 1") as caught:
        sender.send(manifest, WEIGHTS, timeout_s=60.0)
    assert not isinstance(caught.value, TransferTimeoutError)


def test_a_receiver_that_dies_in_mid_transfer_does_too(sender, receiver):
    peer, manifest = receiver
    peer.send_signal(signal.SIGSTOP)
    threading.Timer(0.5, peer.kill).start()
    with takes(0.5), pytest.raises(TransferError, match=r"rank 0 of 2, .* rank 1") as caught:
        sender.send(manifest, WEIGHTS, timeout_s=60.0)
    assert not isinstance(caught.value, TransferTimeoutError)


@pytest.mark.sampled(3)
def test_a_receiver_that_stalls_ends_the_senders_transfer_at_the_deadline(sender, receiver, backend):
    peer, manifest = receiver
    peer.send_signal(signal.SIGSTOP)
    waited_for = {
        "gloo": "sending bucket .*",
        "shm": "(sending bucket .*|preparing for version 1: sharing 50331648 bytes of rank 0.*)",
        "file": "receiving the digest of version 1 from rank 1",  # files are written whether they are read or not
    }
    message = rf"rank 0 of 2, {waited_for[backend]}: not done within 1.5 s"
    with takes(1.5), pytest.raises(TransferTimeoutError, match=message):
        sender.send(manifest, WEIGHTS, timeout_s=1.5)
    assert not sender.is_open


@pytest.mark.sampled(3)
def test_a_transfer_can_be_cancelled_from_another_thread(sender, receiver):
    peer, manifest = receiver
    peer.send_signal(signal.SIGSTOP)
    threading.Timer(0.5, sender.cancel).start()
    with takes(0.5), pytest.raises(TransferError, match="cancelled"):
        sender.send(manifest, WEIGHTS, timeout_s=60.0)


@pytest.fixture
def sending(spawn_peer, backend, directory):
    """A process that sends, its group joined by this one."""
    peer = spawn_peer("send", backend, str(directory), "60")
    invitation = Rendezvous.from_json(peer.stdout.readline())
    manifest = WeightManifest.from_json(peer.stdout.readline())
    group = join_group(invitation, rank=1, device=CPU, deadline=Deadline(60.0))
    assert peer.stdout.readline() == "sending\n"
    receive(group, manifest, memory=HostMemory(), deadline=Deadline(60.0))
    yield peer, group, manifest
    group.close("the test is over")


@pytest.mark.sampled(3)
def test_a_sender_that_died_ends_the_receivers_transfer_at_once(sending):
    peer, group, manifest = sending
    threading.Timer(0.3, peer.kill).start()
    with takes(0.3), pytest.raises(TransferError, match=r"rank 1 of 2, .* rank 0") as caught:
        receive(group, manifest, memory=HostMemory(), deadline=Deadline(60.0))
    assert not isinstance(caught.value, TransferTimeoutError)


@pytest.mark.sampled(3)
def test_a_sender_that_stalls_ends_the_receivers_transfer_at_the_deadline(sending):
    peer, group, manifest = sending
    peer.send_signal(signal.SIGSTOP)
    with (
        takes(1.0),
        pytest.raises(TransferTimeoutError, match=r"rank 1 of 2, (preparing|receiving bucket 1 of 96).* rank 0"),
    ):
        receive(group, manifest, memory=HostMemory(), deadline=Deadline(1.0))


def test_joining_a_sender_that_stalls_ends_at_the_deadline(spawn_peer, directory):
    peer = spawn_peer("send", "gloo", str(directory), "60")
    invitation = Rendezvous.from_json(peer.stdout.readline())
    peer.stdout.readline()
    peer.send_signal(signal.SIGSTOP)
    with takes(1.0), pytest.raises(TransferTimeoutError, match="rank 1 of 2, joining"):
        join_group(invitation, rank=1, device=CPU, deadline=Deadline(1.0))


def test_a_member_that_never_comes_is_named_on_every_other_rank(sender):
    manifest = build_manifest(WEIGHTS, policy_version=1)
    first, _ = sender.open([1, 1])
    (future,) = Receivers([first], [1]).start(manifest, timeout_s=60.0)
    with takes(1.0), pytest.raises(TransferTimeoutError, match="rank 0 of 3, joining: waiting for rank 2: not done"):
        sender.send(manifest, WEIGHTS, timeout_s=1.0)
    with pytest.raises(TransferError, match=r"rank 1 of 3, joining: .*rank 0 gave up: .*waiting for rank 2"):
        future.result(timeout=60.0)


def test_waiting_for_members_can_be_cancelled(sender):
    sender.open([1])
    threading.Timer(0.2, sender.cancel).start()
    with takes(0.2), pytest.raises(TransferError, match="cancelled"):
        sender.send(build_manifest(WEIGHTS, policy_version=1), WEIGHTS, timeout_s=60.0)


@pytest.mark.sampled(3)
def test_after_a_failure_a_new_group_works(sender, receiver):
    peer, manifest = receiver
    peer.kill()
    with pytest.raises(TransferError):
        sender.send(manifest, WEIGHTS, timeout_s=60.0)
    (future,) = Receivers(sender.open([1]), [1]).start(manifest)
    assert sender.send(manifest, WEIGHTS, timeout_s=60.0) == future.result(timeout=60.0).digest


def test_a_receiver_that_gives_up_tells_the_sender_why(sender):
    manifest = build_manifest(WEIGHTS, policy_version=1)
    (invitation,) = sender.open([1])

    def join_and_leave() -> None:
        join_group(invitation, rank=1, device=CPU, deadline=Deadline(20.0)).close("out of memory")

    threading.Thread(target=join_and_leave).start()
    with takes(0.0), pytest.raises(TransferError, match=r"rank 0 of 2, .*rank 1 gave up: out of memory"):
        sender.send(manifest, WEIGHTS, timeout_s=60.0)


def test_the_senders_own_error_reaches_the_receiver(sender):
    manifest = build_manifest(WEIGHTS, policy_version=1)
    (future,) = Receivers(sender.open([1]), [1]).start(manifest, timeout_s=60.0)

    def gather() -> Iterator[tuple[str, object]]:
        yield WEIGHTS[0]
        raise ZeroDivisionError("in the trainer")

    with takes(0.0), pytest.raises(ZeroDivisionError):
        sender.send(manifest, gather(), timeout_s=60.0)
    with pytest.raises(TransferError, match="rank 0 gave up: ZeroDivisionError: in the trainer"):
        future.result(timeout=60.0)


def test_a_member_that_dies_while_others_are_awaited_is_named_at_once(sender):
    first, _ = sender.open([1, 1])
    (future,) = Receivers([first], [1]).start(build_manifest(WEIGHTS, policy_version=1), timeout_s=0.5)
    with takes(0.5), pytest.raises(TransferError, match="rank 0 of 3, joining: waiting for rank 2: rank 1 gave up"):
        sender.send(build_manifest(WEIGHTS, policy_version=1), WEIGHTS, timeout_s=60.0)
    with pytest.raises(TransferTimeoutError):
        future.result(timeout=60.0)
