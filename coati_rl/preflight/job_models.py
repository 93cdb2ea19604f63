"""Find the models of a job beside the one it trains, and what they and their tokenizer ask of its settings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from coati_rl.config import Config
from coati_rl.config.offline import OfflineConfig
from coati_rl.data.chat_template import unread_warnings
from coati_rl.preflight.critic import with_critic
from coati_rl.preflight.resources import (
    checked_model_config,
    read_model_config,
    read_tokenizer,
    resolve_model,
    with_tokenizer,
)
from coati_rl.preflight.same_tokens import check_positions, check_vocabulary, check_vocabulary_sizes
from coati_rl.preflight.sample_rows import TryModel, with_sample_rows
from coati_rl.preflight.teacher import with_teacher


def with_run_models(
    config: Config,
    directory: Path,
    hf_config: Any,
    *,
    check_layout: Callable[..., None],
    try_model: TryModel,
    is_dry_run: bool,
) -> tuple[Config, Any, list[str]]:
    """Return the config of a run with producers as its models ask for it, the tokenizer, and warnings.

    Args:
        config: whose model is the directory.
        directory: of the model.
        hf_config: its transformers config.
        check_layout: of the trainers; raises ConfigError if a teacher cannot be cut as asked.
        try_model: tries whether a model computes packed samples apart.
        is_dry_run: do not fetch a teacher.
    Raises: ConfigError for a chat template or a teacher that does not fit the model.
    """
    has_template = config.data.input_template is not None
    config, tokenizer = with_tokenizer(config, directory, needs_chat_template=not has_template)
    config, of_teacher = with_teacher(
        config,
        config.distillation.teacher,
        tokenizer,
        hf_config,
        without_full="use --distill-kl token" if config.distillation.distill_kl == "full" else None,
        check_layout=check_layout,
        is_dry_run=is_dry_run,
    )
    config, of_critic = with_critic(config, tokenizer, check_layout=check_layout, is_dry_run=is_dry_run)
    models = {"--model": config.model.model, "--teacher": config.distillation.teacher}
    if config.algorithm.has_critic:
        models["--critic-model"] = config.critic.critic_model or config.model.model
    config, of_rows = with_sample_rows(config, models, try_model=try_model)
    of_template = unread_warnings(tokenizer, config.data.chat_template_kwargs)
    return config, tokenizer, [*of_template, *of_teacher, *of_critic, *of_rows]


def with_dataset_models(
    config: OfflineConfig,
    directory: Path,
    hf_config: Any,
    *,
    needs_chat_template: bool,
    check_layout: Callable[..., None],
    try_model: TryModel,
    is_dry_run: bool,
) -> tuple[OfflineConfig, Any, list[str]]:
    """Return the config of a job on a dataset as its models ask for it, the tokenizer, and warnings.

    Args:
        config: whose model is the directory.
        directory: of the model.
        hf_config: its transformers config.
        needs_chat_template: rows are conversations.
        check_layout, try_model: as of `with_run_models`.
        is_dry_run: do not fetch a reference model or a teacher.
    Raises: ConfigError for a chat template, a reference model or a teacher that does not fit the model.
    """
    config, tokenizer = with_tokenizer(config, directory, needs_chat_template=needs_chat_template)
    config = _with_reference(config, tokenizer, hf_config, check_layout=check_layout, is_dry_run=is_dry_run)
    config, warnings = with_teacher(
        config,
        config.teacher,
        tokenizer,
        hf_config,
        without_full="leave --teacher out",
        check_layout=check_layout,
        is_dry_run=is_dry_run,
    )
    config, of_rows = with_sample_rows(config, _computed_models(config), try_model=try_model)
    of_template = unread_warnings(tokenizer, config.data.chat_template_kwargs, is_applied=needs_chat_template)
    return config, tokenizer, [*of_template, *warnings, *of_rows]


def _with_reference(
    config: OfflineConfig, tokenizer: Any, hf_config: Any, *, check_layout: Callable[..., None], is_dry_run: bool
) -> OfflineConfig:
    """Resolve --reference-model. Raises: ConfigError if it cannot score the model's samples in this layout."""
    if not config.uses_reference or config.reference_model == config.model.model:
        return config
    flag = "--reference-model"
    directory = resolve_model(config.reference_model, is_dry_run=is_dry_run, flag=flag)
    if directory is None:
        return config
    named, its_config = f"{flag} {config.reference_model}", read_model_config(directory, flag)
    check_vocabulary(tokenizer, read_tokenizer(directory, flag), model=config.model.model, other=named)
    check_vocabulary_sizes(hf_config.vocab_size, its_config.vocab_size, without_full=None, other=named)
    check_positions(config, its_config, other=named)
    check_layout(config, its_config, named)
    checked_model_config(directory, "scored", flag=flag, is_dry_run=is_dry_run)
    return config.with_changes(reference_model=str(directory))


def _computed_models(config: OfflineConfig) -> dict[str, str | None]:
    """Return the models that compute the micro-batches, by their flags."""
    models: dict[str, str | None] = {"--model": config.model.model}
    if config.uses_reference:
        models["--reference-model"] = config.reference_model
    if config.teacher is not None:
        models["--teacher"] = config.teacher
    return models
