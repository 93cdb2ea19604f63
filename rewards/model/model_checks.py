"""Check the directory of a reward model before anything starts.

A reward model is an AutoModelForSequenceClassification with one label and a linear `score` head that reads the last
token, as `coati-rl rm`, TRL's RewardTrainer and OpenRLHF (with --value_prefix_head score) save it.
"""

import json
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError

HEAD = "score.weight"
_ARCHITECTURE = "ForSequenceClassification"


def check_reward_model(directory: Path, *, flag: str = "--reward-type") -> None:
    """Check that this is a reward model with one label, a score head and a chat template.

    Raises: ConfigError with the directory, what it lacks, and the remedy.
    """
    where = f"{flag} model:{directory}"
    settings = _read_json(directory / "config.json", where)
    architectures = settings.get("architectures") or []
    if not any(str(name).endswith(_ARCHITECTURE) for name in architectures):
        raise ConfigError(
            f"{where}: is a {', '.join(map(str, architectures)) or 'model of unknown kind'} and no reward model; give "
            f"an AutoModelFor{_ARCHITECTURE.removeprefix('For')} with one label, as `coati-rl rm` writes it"
        )
    num_labels = _num_labels(settings)
    if num_labels != 1:
        raise ConfigError(f"{where}: has {num_labels} labels, and a reward is one number; give a model with one label")
    _check_head(directory, where)
    _check_tokenizer(directory, where)
    from coati_rl.model_files.check import check_model_files  # imports torch

    check_model_files(directory, "rated", where=where)


def _read_json(file: Path, where: str) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"{where}: there is no {file.name}; give the directory of a model in Hugging Face format")
    try:
        values = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {file.name} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: {file.name} is no object; give the directory of a model in Hugging Face format")
    return values


def _num_labels(settings: dict[str, Any]) -> int:
    """Return the number of labels, as transformers' configuration reads it: two where nothing is said."""
    labels = settings.get("id2label")
    return len(labels) if isinstance(labels, dict) else int(settings.get("num_labels") or 2)


def _check_head(directory: Path, where: str) -> None:
    from safetensors import SafetensorError, safe_open

    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise ConfigError(f"{where}: has no model.safetensors; save it with save_pretrained (pickles are not read)")
    for file in files:
        try:
            with safe_open(file, framework="np") as tensors:
                if HEAD in tensors.keys():  # noqa: SIM118 - not a mapping
                    return
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{where}: {file.name} cannot be read: {error}") from error
    raise ConfigError(
        f"{where}: has no score head ({HEAD}), so its scores would be random; train one with `coati-rl rm`, or serve "
        "the model and use -rt http://..."
    )


def _check_tokenizer(directory: Path, where: str) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: the tokenizer cannot be loaded: {error}") from error
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{where}: the tokenizer has no chat template, and conversations are scored; save the model with the "
            "tokenizer that it was trained with"
        )
