"""Keep credentials out of the addresses of reward models, as a run writes its settings to files and to W&B.

An address may name environment variables instead, `http://${RM_USER}:${RM_PASSWORD}@host/score?key=${RM_KEY}`.
That text is written; the values are passed from the environment of the process that starts the run to the scoring
processes, and into the requests.
"""

import re
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from coati_rl.errors import ConfigError

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SECRET = re.compile(
    r"(?:^|[^a-z])(?:auth|authorization|bearer|credentials?|jwt|pass|pwd|session|sig|signature)(?:[^a-z]|$)"
    r"|(?:key|token|secret|passw(?:or)?d)$",
    re.IGNORECASE,
)


def redacted(text: str) -> str:
    """Return `text` without users, passwords and queries of any addresses in it, for messages."""
    return re.sub(r"([?#])[^,]*", r"\1...", re.sub(r"^((?:https?:/*)?).*@", r"\1...@", text, flags=re.DOTALL))


def check_no_credentials(url: str, where: str) -> None:
    """Raise ConfigError for an address with a user, a password, or a secret in its query; the message omits it."""
    public = _VARIABLE.sub("", url)
    user, at, _ = public.partition("://")[2].rpartition("@")
    if at and user.strip(":"):
        what = "a user or a password (an @ of a path is %40)"
    else:
        pairs = (pair.partition("=") for pair in re.split("[?#&;]", public)[1:])
        name = next((name for name, _, value in pairs if value and _SECRET.search(name)), None)
        if name is None:
            return
        what = f"a value of {name!r}"
    raise ConfigError(
        f"{where}: {redacted(url)} holds {what}, which would be written into the run's files; export it as an "
        "environment variable and write ${NAME} in its place, in single quotes"
    )


def secrets_of(reward_type: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the variables that addresses in `reward_type` name. Raises: ConfigError for an unset one."""
    names = _VARIABLE.findall(",".join(piece for piece in reward_type.split(",") if "://" in piece))
    for name in names:
        if not environment.get(name):
            raise ConfigError(f"--reward-type {redacted(reward_type)}: ${{{name}}} is not set; export {name}=...")
    return {name: environment[name] for name in names}


def filled_in(url: str, secrets: Mapping[str, str]) -> str:
    """Return `url` with the values of its variables, quoted. Raises: ConfigError for a variable without a value."""
    try:
        return _VARIABLE.sub(lambda match: quote(secrets[match[1]], safe=""), url)
    except KeyError as error:
        raise ConfigError(f"--reward-type {redacted(url)}: no value for the variable {error}") from error


def without_secrets(text: str, url: str, secrets: Mapping[str, str]) -> str:
    """Return `text`, such as a server's message, without the secrets of `url` and its password."""
    try:
        password = urlsplit(url).password
    except ValueError:
        password = None
    for value in sorted({*secrets.values(), *([password] if password else [])}, key=len, reverse=True):
        for form in (value, quote(value, safe="")):
            text = text.replace(form, "...")
    return text
