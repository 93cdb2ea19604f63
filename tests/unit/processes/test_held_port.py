"""Test how a port of an address that the user has given is held."""

import pytest

from coati_rl.errors import ConfigError
from coati_rl.processes.held_port import held_port


@pytest.mark.parametrize("host", ["a..b", "192.0.2.1"])
def test_what_is_no_address_of_this_machine_is_refused_with_the_flag_and_the_remedy(host):
    holding = held_port(host, 1, flags="--join-host", remedy="use another one")
    with pytest.raises(ConfigError, match=r"--join-host: cannot listen there: .+; use another one"), holding:
        pass
