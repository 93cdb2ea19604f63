"""Check texts that end a response against the tokens of a model."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from coati_rl.config import Config
from coati_rl.errors import ConfigError
from coati_rl.model_files.saving import GENERATION


def check_stop_texts(config: Config, tokenizer: Any, model: Path) -> None:
    """Check that each may come up in a response: special tokens are left out of its text.

    Those that end responses anyway, by the tokenizer or generation_config.json in the model's directory, are taken.

    Raises: ConfigError.
    """
    special = {str(each): number for number, each in tokenizer.added_tokens_decoder.items() if each.special}
    ends = {tokenizer.eos_token_id, *_declared(model / GENERATION)}
    for sampling in (config.sampling, *(each.sampling for each in config.by_task.values())):
        for text in sampling.stop:
            number = special.get(text)
            if number is not None and number not in ends:
                raise ConfigError(
                    f"--stop {text}: a special token, which no response has in its text; add its id, {number}, to "
                    f"eos_token_id in {model / GENERATION}, where engines find the tokens that end a response"
                )


def _declared(file: Path) -> list[Any]:
    with suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        return found if isinstance(found, list) else [found]
    return []
