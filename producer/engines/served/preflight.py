"""Check the servers of a run before anything starts: each must be able to be an engine of its model."""

from pathlib import Path

from coati_rl.config import Config
from coati_rl.errors import ConfigError
from producer.engines.served.identity import check_server
from producer.engines.served.server import Server

_ANSWERS_WITHIN_S = 10.0


def check_servers(config: Config, precision: str) -> None:
    """Ask all servers of -b what they are. `precision`: "fp32" or "bf16". Raises: ConfigError, with all problems."""
    problems = []
    for url in config.engine_urls:
        server = Server(url)
        try:
            check_server(
                server,
                Path(config.model.model),
                dtype="bfloat16" if precision == "bf16" else "float32",
                max_model_len=config.max_model_len,
                timeout_s=_ANSWERS_WITHIN_S,
            )
        except ConfigError as error:
            problems.append(str(error))
        finally:
            server.close()
    if problems:
        raise ConfigError("\n".join(problems))
