"""Take what is installed: FSDP2 where ColossalAI is missing, transformers' generation where vLLM is.

`pip install` of the package brings neither of them, since the right build depends on the machine. A default that needs
a missing package is replaced with a warning; the same value written by the user is refused, before anything starts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeVar

from coati_rl.config.sections import JobConfig
from coati_rl.errors import ConfigError

Job = TypeVar("Job", bound=JobConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Need:
    """Name a package that a value of a field needs, and the value that works without it."""

    field: str
    value: str
    package: str
    instead: str
    flag: str
    what_changes: str


_NEEDS = (
    _Need(
        field="plugin",
        value="hybrid",
        package="colossalai",
        instead="fsdp2",
        flag="--plugin",
        what_changes="without -pp and -zero",
    ),
    _Need(
        field="backend",
        value="vllm",
        package="vllm",
        instead="transformers",
        flag="-b",
        what_changes="a slower engine",
    ),
)


def with_installed(config: Job, say: Callable[[str], None]) -> Job:
    """Return the configuration with the values that can be used here.

    Args:
        config: of any command, as it was parsed.
        say: prints a warning.
    Raises: ConfigError for a value that the user has written and whose package is missing.
    """
    section_of = config.section_of()
    for need in _NEEDS:
        section = getattr(config, section_of.get(need.field, ""), None)
        if getattr(section, need.field, None) != need.value or find_spec(need.package) is not None:
            continue
        missing = f"the package {need.package} is not installed"
        if section is not None and need.field in section.model_fields_set:
            raise ConfigError(
                f"{need.flag} {need.value}: {missing}; use {need.flag} {need.instead}, {need.what_changes}, or install "
                "it: source scripts/environment.sh in a clone, docs/install.md for an environment of your own"
            )
        say(f"warning: {missing}: {need.flag} {need.instead} is taken, {need.what_changes} (docs/install.md)")
        config = config.with_changes(**{need.field: need.instead})
    return config
