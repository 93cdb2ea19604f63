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
    if config.takes_turns:
        yield "--colocate with -b URL: a server has devices of its own; leave --colocate out"
    if config.lora.sent_adapter is not None:
        yield "--lora-sync adapter with -b URL: a server gets whole weights; use --lora-sync merged"
    if config.sampling.max_num_seqs is not None:
        yield (
            f"--max-num-seqs {config.sampling.max_num_seqs} with -b URL: has no effect; give --max-num-seqs to the "
            "server"
        )


def stages_on_host(config: Config) -> bool:
    """Return True if producers receive weights in host memory, having no GPU, or not its turn."""
    return config.takes_turns or bool(config.engine_urls)
