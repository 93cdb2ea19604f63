"""Find a run's teacher, and check that the policy can be distilled from it: vocabulary, logits, lengths, layout."""

from collections.abc import Callable
from typing import Any, TypeVar

from coati_rl.config import Config
from coati_rl.config.offline import OfflineConfig
from coati_rl.preflight.resources import checked_model_config, read_model_config, read_tokenizer, resolve_model
from coati_rl.preflight.same_tokens import check_positions, check_vocabulary, check_vocabulary_sizes

Distilled = TypeVar("Distilled", Config, OfflineConfig)


def with_teacher(
    config: Distilled,
    teacher: str | None,
    tokenizer: Any,
    hf_config: Any,
    *,
    without_full: str | None,
    check_layout: Callable[..., None],
    is_dry_run: bool,
) -> tuple[Distilled, list[str]]:
    """Return the config with its teacher as a directory, if it has one, and warnings.

    Args:
        config: of the job; its model is a directory.
        teacher: of the config; None: it has none.
        tokenizer: of the model.
        hf_config: transformers config of the model.
        without_full: where whole distributions are compared, the remedy if that cannot be; None: they are not.
        check_layout: as of `prepare`.
        is_dry_run: do not fetch a teacher.
    Raises: ConfigError if this model cannot be distilled from it.
    """
    if teacher is None:
        return config, []
    directory = resolve_model(teacher, is_dry_run=is_dry_run, flag="--teacher")
    if directory is None:
        return config, [f"--teacher {teacher} is not on this machine: vocabulary and layout are not checked"]
    named = f"--teacher {teacher}"
    check_vocabulary(tokenizer, read_tokenizer(directory, "--teacher"), model=config.model.model, other=named)
    its_config = read_model_config(directory, "--teacher")
    check_vocabulary_sizes(hf_config.vocab_size, its_config.vocab_size, without_full=without_full, other=named)
    check_positions(config, its_config, other=named)
    check_layout(config, its_config, named)
    _, warnings = checked_model_config(directory, "scored", flag="--teacher", is_dry_run=is_dry_run)
    return config.with_changes(teacher=str(directory)), warnings
