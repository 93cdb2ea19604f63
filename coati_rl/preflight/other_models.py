"""Find a model beside the trained one (reference, teacher, critic), and check that it reads the same tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coati_rl.model_files.check import Use
from coati_rl.preflight.resources import (
    Job,
    checked_model_config,
    read_model_config,
    read_tokenizer,
    resolve_model,
)
from coati_rl.preflight.same_tokens import check_positions, check_vocabulary, check_vocabulary_sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherModel:
    """Describe a model beside the trained one."""

    flag: str
    field: str  # of the config
    name: str  # directory or hub id
    use: Use = "scored"
    without_full: str | None = None  # where whole distributions are compared, the remedy if that cannot be


def with_other_model(
    config: Job,
    other: OtherModel,
    tokenizer: Any,
    hf_config: Any,
    *,
    check_layout: Callable[..., None],
    is_dry_run: bool,
) -> tuple[Job, str, list[str]]:
    """Return the config with the model as a directory, its directory (or name, if it is not here), and warnings.

    Args:
        config: of the job; its model is a directory.
        other: of which only the files are checked if it is the trained model.
        tokenizer: of the trained model.
        hf_config: transformers config of the trained model.
        check_layout: as of `Preparation`.
        is_dry_run: do not fetch a model.
    Raises: ConfigError if the model cannot read the trained model's tokens.
    """
    is_own = other.name == config.model.model
    flag = "--model" if is_own else other.flag
    directory = resolve_model(other.name, is_dry_run=is_dry_run, flag=flag)
    named = f"{flag} {other.name}"
    if directory is None:
        return config, other.name, [f"{named} is not on this machine: vocabulary and layout are not checked"]
    if not is_own:
        check_vocabulary(tokenizer, read_tokenizer(directory, flag), model=config.model.model, other=named)
        its_config = read_model_config(directory, flag)
        if other.use == "scored":
            sizes = hf_config.vocab_size, its_config.vocab_size
            check_vocabulary_sizes(*sizes, without_full=other.without_full, other=named)
        check_positions(config, its_config, other=named)
        check_layout(config, its_config, named)
        config = config.with_changes(**{other.field: str(directory)})
    _, warnings = checked_model_config(directory, other.use, flag=flag, is_dry_run=is_dry_run)
    return config, str(directory), warnings
