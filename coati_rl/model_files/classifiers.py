"""Tell which of transformers' classifiers a model directory holds: the scalar head of a reward model or a critic.

A classifier of sequences has a layer `score` without a bias; one of tokens has the same layer, as a rule with one.
"""

from collections.abc import Container
from typing import Any, Literal

from coati_rl.errors import ConfigError

SCORE = "score.weight"
BIAS = "score.bias"

Kind = Literal["sequences", "tokens"]


def kind_of(config: Any, names: Container[str]) -> Kind | None:
    """Return what a directory's classifier has a value of; None: it holds another model, whose scalar head is new.

    Args:
        config: transformers config of the directory.
        names: of the tensors in its files. Where config.json names no classifier, a bias of the head says that it is
            one of tokens.
    """
    if _is_named(config, "SequenceClassification"):
        return "sequences"
    return "tokens" if _is_named(config, "TokenClassification") or BIAS in names else None


def auto_class_of(kind: Kind | None) -> Any:
    """Return transformers' class of a decoder with this head; a new head is one of sequences."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    return AutoModelForTokenClassification if kind == "tokens" else AutoModelForSequenceClassification


def check_one_label(config: Any, where: str) -> None:
    """Raise ConfigError for a classifier of several labels, whose head gives no single value."""
    is_classifier = _is_named(config, "SequenceClassification") or _is_named(config, "TokenClassification")
    if is_classifier and config.num_labels != 1:
        raise ConfigError(
            f"{where} is a classifier with {config.num_labels} labels, and a reward model or critic has one; "
            "use one of these, or the language model it was made from"
        )


def _is_named(config: Any, name: str) -> bool:
    return any(name in str(each) for each in config.architectures or ())
