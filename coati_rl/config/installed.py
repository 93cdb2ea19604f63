"""Take what is installed: FSDP2 where ColossalAI is missing, transformers' generation where vLLM is.

`pip install` of the package brings neither of them, since the right build depends on the machine. A default that needs
a missing package is replaced with a warning; the same value written by the user is refused, before anything starts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import TypeVar

from coati_rl.config.sections import JobConfig
from coati_rl.errors import ConfigError

Job = TypeVar("Job", bound=JobConfig)
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")  # of torch, which vLLM asks for


@dataclass(frozen=True, kw_only=True, slots=True)
class _Need:
    """Name a package that a value of a field needs, and the value that works without it."""

    field: str
    value: str
    package: str
    instead: str
    flag: str
    what_changes: str
    how: str  # it is installed


_NEEDS = (
    _Need(
        field="plugin",
        value="hybrid",
        package="colossalai",
        instead="fsdp2",
        flag="--plugin",
        what_changes="without -pp and -zero",
        how="coati-rl install-engines",
    ),
    _Need(
        field="backend",
        value="vllm",
        package="vllm",
        instead="transformers",
        flag="-b",
        what_changes="a slower engine",
        how="pip install 'coati-rl[cpu]' or 'coati-rl[gpu]'",
    ),
)


def with_installed(config: Job, say: Callable[[str], None]) -> Job:
    """Return the configuration with the values that can be used here.

    Args:
        config: of any command, as it was parsed.
        say: prints a warning.
    Raises: ConfigError for a value that the user has written and whose package is missing.
    """
    if foreign := foreign_builds():
        say(f"warning: {', '.join(foreign)} may be of another torch; if an import fails: coati-rl install-engines")
    section_of = config.section_of()
    for need in _NEEDS:
        section = getattr(config, section_of.get(need.field, ""), None)
        if getattr(section, need.field, None) != need.value or find_spec(need.package) is not None:
            continue
        missing = f"the package {need.package} is not installed"
        if section is not None and need.field in section.model_fields_set:
            raise ConfigError(
                f"{need.flag} {need.value}: {missing}; use {need.flag} {need.instead}, {need.what_changes}, or install "
                f"it: source scripts/environment.sh in a clone, {need.how} elsewhere (docs/install.md)"
            )
        say(f"warning: {missing}: {need.flag} {need.instead} is taken, {need.what_changes} (docs/install.md)")
        config = config.with_changes(**{need.field: need.instead})
    return config


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def foreign_builds() -> list[str]:
    """Return torch's companions whose build is marked otherwise than torch's, such as 0.28.0 beside 2.13.0+cpu.

    transformers imports them where they are installed, and fails if they are of another torch.
    """
    build = _build(installed_version("torch") or "")
    found = {name: installed_version(name) for name in COMPANIONS}
    return [f"{name} {version}" for name, version in found.items() if version and _build(version) != build]


def _build(version: str) -> str:
    """Return the local part of a version: cpu of 2.13.0+cpu."""
    return version.partition("+")[2]
