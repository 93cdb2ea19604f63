"""Test the sockets over which members connect and detect each other's end."""

import json
import socket
import threading

import pytest

from coati_rl.errors import TransferError, TransferTimeoutError
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.peer_connection import PeerConnection, PeerHub, join_hub

NESTED = b"[" * 5000 + b"\n"


def pair() -> tuple[PeerConnection, socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    listener.close()
    return PeerConnection(one, peer="rank 3"), other


def settle(peer_connection: PeerConnection) -> str | None:
    """Return the failure once the bytes in transit have arrived."""
    for _ in range(200):
        if peer_connection.failure() is not None:
            break
        threading.Event().wait(0.005)
    return peer_connection.failure()


def test_a_peer_that_is_there_or_left_in_peace_is_no_loss():
    peer_connection, peer = pair()
    assert peer_connection.failure() is None
    peer.sendall(b'{"end": null}\n')
    peer.close()
    threading.Event().wait(0.05)
    assert peer_connection.failure() is None


def test_a_closed_socket_without_a_farewell_is_a_death():
    peer_connection, peer = pair()
    peer.close()
    assert settle(peer_connection) == "rank 3 died"


def test_a_farewell_with_a_reason_is_passed_on():
    peer_connection, peer = pair()
    peer.sendall(b'{"end": "out of memory"}\n')
    assert settle(peer_connection) == "rank 3 gave up: out of memory"


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n", b"[1, 2]\n", b"\xff\xfe\n", b"x" * 100_000, NESTED])
def test_noise_is_a_loss_and_never_an_exception(noise):
    peer_connection, peer = pair()
    peer.sendall(noise)
    assert settle(peer_connection).startswith("lost rank 3: ")


def test_lines_come_out_one_by_one_however_they_arrive():
    peer_connection, peer = pair()
    for part in (b'{"a"', b': 1}\n{"b": 2}\n'):
        peer.sendall(part)
        threading.Event().wait(0.02)
    assert [peer_connection.receive() for _ in range(3)] == [{"a": 1}, {"b": 2}, None]


def test_unknown_processes_and_duplicate_ranks_are_refused_and_members_are_found():
    hub = PeerHub("127.0.0.1", secret="ours")
    unidentified = [socket.create_connection(("127.0.0.1", hub.port)) for _ in range(7)]
    unidentified[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    unidentified[1].sendall(json.dumps({"rank": 1, "secret": "öurs"}).encode() + b"\n")  # of an older group, or nobody
    unidentified[2].sendall(json.dumps({"rank": 2, "secret": "ours"}).encode() + b"\n")  # there are ranks 0 and 1 only
    unidentified[3].sendall(json.dumps({"rank": 1}).encode() + b"\n")
    unidentified[4].close()
    unidentified[5].sendall(b'{"rank": 1, "secret": "\\ud800"}\n')  # half of a character
    unidentified[6].sendall(NESTED)

    answers = []

    def join() -> None:
        line = join_hub("127.0.0.1", hub.port, rank=1, secret="ours", what="joining", deadline=Deadline(20.0))
        answers.append(line[1])

    thread = threading.Thread(target=join)
    thread.start()
    (member,) = hub.gather(2, deadline=Deadline(20.0))
    assert member.peer == "rank 1"
    member.send({"go": 7})
    thread.join()
    assert answers == [7], "the member is the one of this group"


def test_those_who_are_missing_are_named():
    hub = PeerHub("127.0.0.1", secret="ours")
    with pytest.raises(TransferTimeoutError, match=r"waiting for rank 1, 2: not done within 0\.1 s"):
        hub.gather(3, deadline=Deadline(0.1))


def test_an_address_that_is_not_ours_is_refused_by_name():
    with pytest.raises(TransferError, match=r"cannot listen on 192\.0\.2\.1"):
        PeerHub("192.0.2.1", secret="ours")
