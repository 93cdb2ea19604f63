"""Find a run's models, read their tokenizers and configurations, and check their lengths."""

from pathlib import Path
from typing import Any

from coati_rl.config import Config
from coati_rl.errors import ConfigError


def resolve_model(model: str, *, is_dry_run: bool, flag: str = "--model") -> Path | None:
    """Return the model's directory; a hub id is taken from the local cache or downloaded. None: only in a dry run.

    Raises: ConfigError, which names `flag`.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{flag} {model}: the directory has no config.json; give a model in Hugging Face format")
        return directory.absolute()
    if directory.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1 or directory.parent.is_dir():
        raise ConfigError(f"{flag} {model}: no such directory; give a model directory or a hub id (owner/name)")
    if is_dry_run:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(
            f"{flag} {model}: neither a directory nor a model that the hub provides ({type(error).__name__})"
        ) from error


def load_tokenizer(directory: Path) -> Any:
    """Load the model's tokenizer, which must have a chat template."""
    tokenizer = read_tokenizer(directory)
    if not tokenizer.chat_template:
        raise ConfigError(f"--model {directory}: the tokenizer has no chat template; use an instruction-tuned model")
    return tokenizer


def read_tokenizer(directory: Path, flag: str = "--model") -> Any:
    """Load a model's tokenizer."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {directory}: the tokenizer cannot be loaded: {error}") from error


def read_model_config(directory: Path, flag: str = "--model") -> Any:
    """Return the transformers config of the model's text part."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{flag} {directory}: config.json cannot be read: {error}") from error


def check_length(config: Config, model: Any, name: str) -> None:
    """Raise a ConfigError if a model (its transformers config), named by its flag, has too few positions."""
    limit = getattr(model, "max_position_embeddings", None)
    rope = getattr(model, "rope_parameters", None) or {}
    is_extended = rope.get("rope_type", "default") != "default"  # the engine knows its limit
    if isinstance(limit, int) and config.max_model_len > limit and not is_extended:
        raise ConfigError(f"{_length(config)} the {limit} positions of {name}; nearest: {_shorter(config, limit)}")


def _length(config: Config) -> str:
    sampling = config.sampling
    if sampling.max_episode_tokens is not None:
        return f"--max-episode-tokens {sampling.max_episode_tokens} exceeds"
    return (
        f"-mpt {config.data.max_prompt_tokens} + -mnt {sampling.max_new_tokens} = {config.max_model_len} tokens exceed"
    )


def _shorter(config: Config, limit: int) -> str:
    data = config.data
    if config.sampling.max_episode_tokens is not None:
        return f"--max-episode-tokens {limit}{f' -mpt {limit // 2}' if limit <= data.max_prompt_tokens else ''}"
    if data.max_prompt_tokens < limit:
        return f"-mnt {limit - data.max_prompt_tokens}"
    return f"-mpt {limit // 2} -mnt {min(config.sampling.max_new_tokens, limit - limit // 2)}"
