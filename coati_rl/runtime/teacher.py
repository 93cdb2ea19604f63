"""Find a run's teacher, and check that the policy can be distilled from it: vocabulary, logits, lengths, layout."""

from collections.abc import Callable
from typing import Any, TypeVar

from coati_rl.config import Config
from coati_rl.config.offline_jobs import SftJobConfig
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.runtime.resources import read_model_config, read_tokenizer, resolve_model

Distilled = TypeVar("Distilled", Config, SftJobConfig)


def with_teacher(
    config: Distilled,
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
        tokenizer: of the model.
        hf_config: transformers config of the model.
        without_full: where whole distributions are compared, the remedy if that cannot be; None: they are not.
        check_layout: as of `prepare`.
        is_dry_run: do not fetch a teacher.
    Raises: ConfigError if this model cannot be distilled from it.
    """
    teacher = config.distillation.teacher
    if teacher is None:
        return config, []
    directory = resolve_model(teacher, is_dry_run=is_dry_run, flag="--teacher")
    if directory is None:
        return config, [f"--teacher {teacher} is not on this machine: vocabulary and layout are not checked"]
    check_vocabulary(tokenizer, read_tokenizer(directory, "--teacher"), model=config.model.model, teacher=teacher)
    its_config = read_model_config(directory, "--teacher")
    check_vocabulary_sizes(hf_config.vocab_size, its_config.vocab_size, without_full=without_full, teacher=teacher)
    _check_positions(config, its_config, teacher)
    check_layout(config, its_config, f"--teacher {teacher}")
    return config.with_changes(teacher=str(directory)), []


def check_vocabulary(tokenizer: Any, teacher_tokenizer: Any, *, model: str, teacher: str) -> None:
    """Raise a ConfigError unless both tokenizers give every token the same id.

    Args:
        tokenizer: of the policy.
        teacher_tokenizer: of the teacher.
        model: the policy by name, for the message.
        teacher: the teacher by name, for the message.
    """
    own, other = tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
    if own == other:
        return
    own_by_id, other_by_id = ({number: token for token, number in each.items()} for each in (own, other))
    # Where two tokens share an id, no id may differ although the vocabularies do.
    first = min((i for i in own_by_id.keys() | other_by_id.keys() if own_by_id.get(i) != other_by_id.get(i)), default=0)
    raise ConfigError(
        f"--teacher {teacher}: its vocabulary of {len(other)} tokens is not that of --model {model}, which has "
        f"{len(own)}; the first difference is id {first}: {_named(other_by_id.get(first))} of the teacher, "
        f"{_named(own_by_id.get(first))} of the model; use a teacher with the same tokenizer"
    )


def check_vocabulary_sizes(vocab_size: int, teacher_vocab_size: int, *, without_full: str | None, teacher: str) -> None:
    """Raise a ConfigError unless the teacher has logits for all tokens that the policy has logits for.

    Models with one tokenizer may have embeddings of different sizes, filled up to a round number.

    Args:
        vocab_size: logits of the policy.
        teacher_vocab_size: logits of the teacher.
        without_full: as of `with_teacher`; whole distributions must have equally many logits.
        teacher: by name, for the message.
    """
    if teacher_vocab_size < vocab_size:
        raise ConfigError(
            f"--teacher {teacher}: has logits for {teacher_vocab_size} tokens, and the model samples from "
            f"{vocab_size}; use a teacher whose vocab_size is at least {vocab_size}"
        )
    if without_full is not None and teacher_vocab_size != vocab_size:
        raise ConfigError(
            f"--teacher {teacher}: whole distributions are compared, and the teacher has {teacher_vocab_size} logits, "
            f"the model {vocab_size}; {without_full}, or another teacher"
        )


def _check_positions(config: TrainingConfig, its_config: Any, teacher: str) -> None:
    limit, length = getattr(its_config, "max_position_embeddings", None), config.max_sample_tokens
    rope = getattr(its_config, "rope_parameters", None) or {}
    if isinstance(limit, int) and length > limit and rope.get("rope_type", "default") == "default":
        raise ConfigError(
            f"--teacher {teacher}: has {limit} positions, and a sample may have {length} tokens; use shorter samples, "
            "or a teacher with more positions"
        )


def _named(token: str | None) -> str:
    return "none" if token is None else repr(token)
