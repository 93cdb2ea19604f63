"""Read a model's config.json, and the quantisation that it declares."""

import copy
import functools
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError

DEQUANTIZED = frozenset({"fp8"})  # quantisation methods that transformers' loader undoes


def read_config(directory: Path, where: str) -> Any:
    """Return the transformers config; no code from the directory is run.

    A checkpoint of a method of DEQUANTIZED is loaded in floating point, on GPUs that compute in it, too.

    Args:
        directory: of the model.
        where: the flag and what it named, for messages.
    Raises: ConfigError.
    """
    try:
        written = (directory / "config.json").stat()
        config = copy.deepcopy(_read(directory, written.st_mtime_ns, written.st_size))
    except Exception as error:  # of the class's own code and checks, with whatever values there are
        raise ConfigError(f"{where}: config.json cannot be read: {' '.join(str(error).split())}") from error
    if quantization_method(config) in DEQUANTIZED:
        found = config.quantization_config
        settings = found if isinstance(found, dict) else found.to_dict()
        config.quantization_config = {**settings, "dequantize": True}
    return config


@functools.lru_cache(maxsize=8)
def _read(directory: Path, mtime_ns: int, size: int) -> Any:
    """Return the config of the file as it is now: a run's preparation asks for each ten times."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(directory, trust_remote_code=False)


def setting(hf_config: Any, name: str) -> Any:
    """Return a setting by name, a list of those of all decoder layers where these differ; None: there is none."""
    try:
        return getattr(hf_config, name, None)
    except RuntimeError:  # transformers' answer for a config whose layers differ, as Gemma 4's do
        return [getattr(each, name, None) for each in hf_config.per_layer_config]


def of_layers(hf_config: Any, name: str) -> Any:
    """Return a setting of decoder layers, the largest one where they differ; None: there is none."""
    value = setting(hf_config, name)
    return max(filter(None, value), default=None) if isinstance(value, list | tuple) else value


def quantization_method(config: Any) -> str | None:
    """Return the name of the quantisation that config.json declares, None if it declares none."""
    for each in (config, config.get_text_config()):
        settings = getattr(each, "quantization_config", None)
        if settings is not None:
            found = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
            return str(getattr(found, "value", found) or "unknown")
    return None
