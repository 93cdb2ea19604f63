"""Our end of a worker's socket: whole lines come out, whatever the pieces, and nothing blocks."""

import socket

import pytest

from rewards.workers.channel import Channel, ChannelClosedError


@pytest.fixture
def ends() -> tuple[Channel, socket.socket]:
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs


def test_lines_are_received_whole(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    assert channel.receive() == []
    peer.sendall(b"one\ntw")
    assert channel.receive() == [b"one"]
    peer.sendall(b"o\nthree\n")
    assert channel.receive() == [b"two", b"three"]


def test_what_was_said_before_the_end_is_received_before_it(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    peer.sendall(b"last words\n")
    peer.close()
    assert channel.receive() == [b"last words"]
    with pytest.raises(ChannelClosedError, match="end of stream"):
        channel.receive()


def test_a_message_that_the_socket_does_not_hold_is_sent_as_it_is_read(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    line = b"x" * 3_000_000 + b"\n"
    channel.send(line)
    assert channel.is_sending
    received = b""
    while len(received) < len(line):
        received += peer.recv(1 << 20)
        channel.flush()
    assert received == line
    assert not channel.is_sending


def test_sending_to_a_process_that_has_ended_says_so(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    peer.close()
    with pytest.raises(ChannelClosedError):
        channel.send(b"hello\n")


def test_closing_ends_the_stream_of_the_other_end(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    channel.close()
    assert peer.recv(1) == b""
