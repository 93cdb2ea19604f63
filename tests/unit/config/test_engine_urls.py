"""Test -b with addresses of servers: what is read, what is refused, and which producer gets which server."""

import pytest

from coati_rl.config.cli import parse
from coati_rl.config.engine_urls import ServerShares, server_urls
from coati_rl.config.rules import check
from coati_rl.config.server_rules import stages_on_host
from coati_rl.errors import ConfigError
from coati_rl.preflight.placement import Request

A, B = "http://a:8000", "http://b:8000"
RUN = ["-m", "m", "-d", "d", "-rt", "boxed", "-t", "1", "-ibs", "4", "-imbs", "4"]
RUN += ["-tbs", "8", "-tMbs", "8", "-tmbs", "4", "-g", "4"]


def config_of(*flags):
    return parse([*RUN, *flags])[0]


@pytest.mark.parametrize(
    ("backend", "urls"), [("vllm", ()), (A, (A,)), (f"{A}/,{B}", (A, B)), ("https://a/v/", ("https://a/v",))]
)
def test_a_value_names_an_engine_or_servers(backend, urls):
    assert server_urls(backend) == urls
    assert config_of("-b", backend).engine_urls == urls


def test_each_engine_is_one_server():
    check(config_of("-b", f"{A},{B}", "-i", "2"))
    with pytest.raises(ConfigError, match="-b names 1 servers, -i 2 engines: each engine is one server; use -i 1"):
        check(config_of("-b", A, "-i", "2"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--colocate -nb 0", f"--colocate with -b {A},{B}: a server has devices of its own"),
        ("-ptp 2", "--producer-tensor-parallel-size 2 without --backend vllm"),
    ],
)
def test_what_a_server_does_not_take_is_refused(flags, message):
    with pytest.raises(ConfigError) as caught:
        check(config_of("-b", f"{A},{B}", "-i", "2", *flags.split()))
    assert message in str(caught.value)


def test_producers_of_servers_have_no_gpu_and_receive_weights_on_the_host():
    config = config_of("-b", f"{A},{B}", "-i", "2")
    assert config.num_devices == 1, "the trainer's"
    assert Request.of(config, "cuda").actors["producer"].each.gpus == 0
    assert stages_on_host(config) and not stages_on_host(config_of("-b", "vllm"))


def test_the_replacement_of_a_lost_producer_gets_its_server():
    shares = ServerShares((A, B))
    assert [shares.take(0), shares.take(1)] == [A, B]
    shares.release(0)
    assert shares.take(2) == A
    assert ServerShares(()).take(0) == ""
