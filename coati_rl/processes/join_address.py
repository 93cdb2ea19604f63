"""Check where producers join a run over HTTPS, and keep the token that lets them, in a private file of the run."""

import os
import secrets
import ssl
from contextlib import AbstractContextManager
from pathlib import Path

from coati_rl.config.parallel import ParallelConfig
from coati_rl.disk import disk_errors
from coati_rl.errors import ConfigError
from coati_rl.processes.held_port import held_port

TOKEN_VARIABLE = "COATI_JOIN_TOKEN"
TOKEN_FILE = "join_token"
_MIN_LENGTH = 12  # characters; a shorter one could be guessed


def join_url(parallel: ParallelConfig) -> str:
    """Return the URL of a run's --join-port."""
    host = f"[{parallel.join_host}]" if ":" in parallel.join_host else parallel.join_host
    return f"{'http' if parallel.join_cert is None else 'https'}://{host}:{parallel.join_port}"


def check_join_secrets(parallel: ParallelConfig) -> None:
    """Raise ConfigError if the run's certificate or token cannot be used, before anything starts."""
    if parallel.join_cert is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                parallel.join_cert, parallel.join_key, password=""
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--join-cert {parallel.join_cert} --join-key {parallel.join_key}: cannot be used: {error}; give two "
                "PEM files, of a certificate and of its key without a password"
            ) from error
    token_from(os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(), TOKEN_VARIABLE)


def join_port_held(parallel: ParallelConfig) -> AbstractContextManager[None]:
    """See `held_port`: the join server shares the port."""
    flags = f"--join-host {parallel.join_host} --join-port {parallel.join_port}"
    return held_port(parallel.join_host, parallel.join_port or 0, flags=flags, remedy="use another one")


def write_token(run_dir: Path) -> Path:
    """Write the token of the environment, else a new one. Returns: the file, which its owner alone can read."""
    path = run_dir / TOKEN_FILE
    with disk_errors(path):
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32))
    return path


def token_from(text: str, where: str) -> str:
    """Return a token as it is sent. Raises: ConfigError, which begins with `where`, for one that cannot be one."""
    token = text.strip()
    if len(token) < _MIN_LENGTH or not all("!" <= character <= "~" for character in token):
        raise ConfigError(f"{where}: holds no token; it has {_MIN_LENGTH} visible ASCII characters or more")
    return token
