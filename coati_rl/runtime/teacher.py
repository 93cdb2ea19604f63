"""Find a run's teacher, and check that the policy can be distilled from it: vocabulary, logits, lengths, layout."""

from collections.abc import Callable
from typing import Any

from coati_rl.config import Config
from coati_rl.errors import ConfigError
from coati_rl.runtime.models import check_length, read_model_config, read_tokenizer, resolve_model


def with_teacher(
    config: Config, hf_config: Any, tokenizer: Any, check_layout: Callable[..., None], *, is_dry_run: bool
) -> tuple[Config, list[str]]:
    """Return the config with the teacher as a directory, and warnings.

    Args:
        config: its model is a directory.
        hf_config: transformers config of the model.
        tokenizer: of the model.
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
    its_config, is_full = read_model_config(directory, "--teacher"), config.distillation.distill_kl == "full"
    check_vocabulary_sizes(hf_config.vocab_size, its_config.vocab_size, is_full=is_full, teacher=teacher)
    check_length(config, its_config, f"--teacher {teacher}")
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


def check_vocabulary_sizes(vocab_size: int, teacher_vocab_size: int, *, is_full: bool, teacher: str) -> None:
    """Raise a ConfigError unless the teacher has logits for all tokens that the policy has logits for.

    Models with one tokenizer may have embeddings of different sizes, filled up to a round number.

    Args:
        vocab_size: logits of the policy.
        teacher_vocab_size: logits of the teacher.
        is_full: whole distributions are compared, which must have equally many logits.
        teacher: by name, for the message.
    """
    if teacher_vocab_size < vocab_size:
        raise ConfigError(
            f"--teacher {teacher}: has logits for {teacher_vocab_size} tokens, and the model samples from "
            f"{vocab_size}; use a teacher whose vocab_size is at least {vocab_size}"
        )
    if is_full and teacher_vocab_size != vocab_size:
        raise ConfigError(
            f"--distill-kl full with --teacher {teacher}: compares distributions over the same logits, and the teacher "
            f"has {teacher_vocab_size}, the model {vocab_size}; use --distill-kl token"
        )


def _named(token: str | None) -> str:
    return "none" if token is None else repr(token)
