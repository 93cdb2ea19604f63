"""Check the settings of runs whose engines are servers that were started elsewhere."""

from collections.abc import Iterator

from coati_rl.config.config import Config
from coati_rl.config.engine_urls import server_urls


def server_problems(config: Config) -> Iterator[str]:
    """Return why a run cannot use the servers of its -b, each with a remedy."""
    urls = server_urls(config.sampling.backend)
    if not urls:
        return
    engines = config.parallel.num_inferencer
    if engines != len(urls):
        yield f"-b names {len(urls)} servers, -i {engines} engines: each engine is one server; use -i {len(urls)}"


def stages_on_host(config: Config) -> bool:
    """Return True if producers receive weights in host memory, having no GPU, or not its turn."""
    return config.takes_turns or bool(config.engine_urls) or config.parallel.join_port is not None


def join_problems(config: Config) -> Iterator[str]:
    """Return why producers cannot join a run over HTTPS, each with a remedy."""
    parallel = config.parallel
    if parallel.join_port is None:
        return
    if (parallel.join_cert is None) != (parallel.join_key is None):
        yield "--join-cert and --join-key: give both or none"
    if parallel.join_cert is None and not _is_loopback(parallel.join_host):
        yield (
            f"--join-host {parallel.join_host} without --join-cert: the token and the weights would be sent "
            "unencrypted; give --join-cert and --join-key, or --join-host 127.0.0.1 behind a TLS server"
        )


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"
