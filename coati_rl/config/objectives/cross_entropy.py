"""Set which tokens supervised fine-tuning trains on."""

from typing import Literal

from coati_rl.config.fields import Section, experiment

LossOn = Literal["assistant", "last", "all"]


class CrossEntropyConfig(Section):
    """Loss of supervised fine-tuning: cross-entropy, averaged over the tokens of a step."""

    loss_on: LossOn = experiment(
        "assistant",
        "Tokens that are trained: all turns of the assistant, the last one alone, or all tokens of the row. Of plain "
        "text all are, or those of the completion.",
    )
