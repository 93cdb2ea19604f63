"""Check that a model has embeddings of all tokens, and that another one can score the samples of the trained one."""

from collections.abc import Iterable
from typing import Any

from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.preflight.resources import positions_of


def check_vocabulary(tokenizer: Any, other_tokenizer: Any, *, model: str, other: str) -> None:
    """Raise a ConfigError unless both tokenizers give every token the same id.

    Args:
        tokenizer: of the trained model.
        other_tokenizer: of the other model.
        model: the trained model by name, for the message.
        other: flag and value of the other model, for the message.
    """
    own, its = tokenizer.get_vocab(), other_tokenizer.get_vocab()
    if own == its:
        return
    own_by_id, its_by_id = ({number: token for token, number in each.items()} for each in (own, its))
    # Where two tokens share an id, no id may differ although the vocabularies do.
    first = min((i for i in own_by_id.keys() | its_by_id.keys() if own_by_id.get(i) != its_by_id.get(i)), default=0)
    raise ConfigError(
        f"{other}: its vocabulary of {len(its)} tokens is not that of --model {model}, which has {len(own)}; the first "
        f"difference is id {first}: {_named(its_by_id.get(first))} there, {_named(own_by_id.get(first))} of the model; "
        "use one with the same tokenizer"
    )


def check_vocabulary_sizes(vocab_size: int, its_vocab_size: int, *, without_full: str | None, other: str) -> None:
    """Raise a ConfigError unless the other model has logits for all tokens that the trained one has logits for.

    Models with one tokenizer may have embeddings of different sizes, filled up to a round number.

    Args:
        vocab_size: logits of the trained model.
        its_vocab_size: logits of the other one.
        without_full: where whole distributions are compared, which must have equally many logits, the remedy; None:
            they are not.
        other: flag and value of the other model, for the message.
    """
    if its_vocab_size < vocab_size:
        raise ConfigError(
            f"{other}: has logits for {its_vocab_size} tokens, and the model for {vocab_size}; use one whose "
            f"vocab_size is at least {vocab_size}"
        )
    if without_full is not None and its_vocab_size != vocab_size:
        raise ConfigError(
            f"{other}: whole distributions are compared, and it has {its_vocab_size} logits, the model {vocab_size}; "
            f"{without_full}, or use another one"
        )


def check_token_ids(flag: str, rows: Iterable[tuple[str, int]], vocab_size: int, model: str) -> None:
    """Raise ConfigError for a token that the trained model has no embedding of.

    Args:
        flag: of the rows.
        rows: their names and largest token ids.
        vocab_size: of the model.
        model: its name, for the message.
    """
    for name, largest in rows:
        if largest >= vocab_size:
            raise ConfigError(
                f"{flag}: {name} has the token {largest}, and --model {model} has embeddings of {vocab_size} tokens "
                "(vocab_size of its config.json); use the tokenizer that belongs to it, or a model whose embeddings "
                "were enlarged for these tokens"
            )


def check_positions(config: TrainingConfig, its_config: Any, *, other: str) -> None:
    """Raise a ConfigError if a sample may have more tokens than the other model has positions."""
    limit, length = positions_of(its_config), config.max_sample_tokens
    if limit is not None and length > limit:
        raise ConfigError(
            f"{other}: has {limit} positions, and a sample may have {length} tokens; use shorter samples, or a model "
            "with more positions"
        )


def _named(token: str | None) -> str:
    return "none" if token is None else repr(token)
