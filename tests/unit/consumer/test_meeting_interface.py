"""Through which network interface the trainers' gloo talks to the others."""

import socket

import psutil
import pytest

from coati_rl.errors import EngineError
from consumer.parallel.process_group import interface_towards


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_the_loopback_leads_to_itself(address):
    assert interface_towards(address) == "lo"


def test_an_address_of_this_machine_leads_to_the_interface_that_has_it():
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family == socket.AF_INET:
                assert interface_towards(entry.address) == name


def test_an_address_without_a_meaning_is_refused_by_name():
    with pytest.raises(EngineError, match="meeting point no-such-host"):
        interface_towards("no-such-host.invalid")
