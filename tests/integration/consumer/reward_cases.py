"""Define the steps that reward models are trained with, and their plain training without rows, micro-batches or ranks.

Plain training: transformers' own forward of one sequence at a time, the formula of the paper, torch's clipping and
AdamW.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from coati_rl.algorithms.value_loss import ValueLoss
from coati_rl.reading.reward_samples import process_sample, reward_pair
from coati_rl.samples import Sample
from consumer.models.scalar_head import ScalarHead
from consumer.objectives.objective import Objective
from consumer.objectives.pairwise import Pairwise
from consumer.objectives.process_reward import ProcessReward
from consumer.objectives.value_pretraining import ValuePretraining
from tests.integration.consumer.conftest import (
    CONFIGS,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    NUM_STEPS,
    VOCAB_SIZE,
    WEIGHT_DECAY,
    decay_groups,
    save_model,
)

PAD, PLACEHOLDER, POSITIVE, NEGATIVE = 0, 1, 2, 3  # token ids; the texts have others
CENTER = 0.05
PlainLoss = Callable[[PreTrainedModel, Sequence[Sample]], Tensor]


def save_reward_model(directory: Path, architecture: str = "qwen3", *, tied: bool = True) -> Path:
    """A tiny model with a scalar head, whose weights bfloat16 can hold."""
    save_model(directory / "lm", architecture, tied=tied)
    config = CONFIGS[architecture].from_pretrained(directory / "lm", num_labels=1, pad_token_id=PAD)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(directory / "lm", config=config)
    with torch.no_grad():
        model.score.weight.normal_(std=0.1)
    model.bfloat16().float().save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def pairs_of(step: int) -> list[Sample]:
    """Seven pairs, which two ranks cannot share out equally; responses of 2 to 12 tokens."""
    rng = np.random.default_rng(300 + step)

    def ids(low: int, high: int) -> np.ndarray:
        return rng.integers(4, VOCAB_SIZE, int(rng.integers(low, high)))

    samples: list[Sample] = []
    for number in range(7):
        margin = float(rng.uniform(0, 1))
        samples += reward_pair(str(number), ids(2, 6), ids(2, 12), ids(2, 12), pad_token_id=PAD, margin=margin)
    return samples


def solutions_of(step: int) -> list[Sample]:
    """Seven solutions of one to four steps, some with the step's probability to be right."""
    rng = np.random.default_rng(400 + step)
    samples = []
    for number in range(7):
        labels = [float(rng.choice([0.0, 1.0, 0.3])) for _ in range(int(rng.integers(1, 5)))]
        steps = [[*rng.integers(4, VOCAB_SIZE, int(rng.integers(2, 6))), PLACEHOLDER] for _ in labels]
        end = rng.integers(4, VOCAB_SIZE, number % 2)  # every other one ends with a placeholder
        places = np.cumsum([len(step) for step in steps]) - 1
        samples.append(process_sample(str(number), np.concatenate([*steps, end]), labels, places=places))
    return samples


def answers_of(step: int) -> list[Sample]:
    """Seven recorded answers, of one to nine tokens, some with a tool's tokens in between, and random returns."""
    rng = np.random.default_rng(500 + step)
    samples = []
    for number in range(7):
        mask = np.ones(int(rng.integers(1, 10)), dtype=bool)
        mask[2:4] = False  # cut off of a short one
        samples.append(
            Sample(
                uid=str(number),
                number=0,
                prefix_ids=rng.integers(4, VOCAB_SIZE, int(rng.integers(1, 5))),
                token_ids=rng.integers(4, VOCAB_SIZE, len(mask)),
                loss_mask=mask,
                arrays={
                    "loss_weights": 1.0,
                    "temperature": 1.0,
                    "returns": rng.normal(size=mask.sum()).astype(np.float32),
                },
            )
        )
    return samples


def plain_values(model: PreTrainedModel, samples: Sequence[Sample]) -> Tensor:
    """The mean over sampled tokens of (V - G)^2 / 2; V is read at the token before."""
    terms = []
    for sample in samples:
        token_ids = torch.tensor(np.concatenate([sample.prefix_ids, sample.token_ids]))[None]
        hidden = model.model(input_ids=token_ids).last_hidden_state[0]
        places = len(sample.prefix_ids) + np.flatnonzero(sample.loss_mask) - 1
        values = model.score(hidden[places]).squeeze(-1)
        terms.append((values - torch.tensor(sample.arrays["returns"])).square() / 2)
    return torch.cat(terms).mean()


def plain_pairs(model: PreTrainedModel, samples: Sequence[Sample]) -> Tensor:
    rewards = torch.stack([plain_score(model, sample) for sample in samples])
    chosen, rejected = rewards[::2], rewards[1::2]
    margin = torch.tensor([sample.arrays["margin"] for sample in samples[::2]])
    terms = torch.log1p(torch.exp(-(chosen - rejected - margin))) + CENTER * (chosen + rejected) ** 2
    return terms.mean()


def plain_score(model: PreTrainedModel, sample: Sample) -> Tensor:
    """float32[]: the sequence with its padding token, as transformers reads it."""
    token_ids = np.concatenate([sample.prefix_ids, sample.token_ids])
    return model(input_ids=torch.tensor(token_ids)[None], attention_mask=None).logits[0, 0]


def plain_steps_loss(model: PreTrainedModel, samples: Sequence[Sample], *, is_restricted: bool) -> Tensor:
    terms = []
    for sample in samples:
        places = np.flatnonzero(sample.loss_mask) - 1
        logits = model(input_ids=torch.tensor(sample.token_ids)[None]).logits[0, places]
        right = torch.tensor(sample.arrays["step_label"])
        target = torch.stack([right, 1 - right], dim=-1)
        if is_restricted:
            logits = logits[:, [POSITIVE, NEGATIVE]]
        else:
            target = F.pad(target, (POSITIVE, VOCAB_SIZE - NEGATIVE - 1))
        terms.append(F.cross_entropy(logits, target, reduction="none"))
    return torch.cat(terms).mean()


@dataclass(frozen=True, kw_only=True)
class RewardCase:
    """An objective, the samples of a step, and its plain loss."""

    objective: Objective
    samples: Callable[[int], list[Sample]]
    plain_loss: PlainLoss
    denominator: Callable[[Sequence[Sample]], int]
    head: ScalarHead | None


def num_loss_tokens(samples: Sequence[Sample]) -> int:
    return sum(sample.num_loss_tokens for sample in samples)


def process_case(*, is_restricted: bool) -> RewardCase:
    return RewardCase(
        objective=ProcessReward(label_token_ids=(POSITIVE, NEGATIVE), is_restricted=is_restricted),
        samples=solutions_of,
        plain_loss=functools.partial(plain_steps_loss, is_restricted=is_restricted),
        denominator=num_loss_tokens,
        head=None,
    )


CASES = {
    "pairwise": RewardCase(
        objective=Pairwise(center_coefficient=CENTER),
        samples=pairs_of,
        plain_loss=plain_pairs,
        denominator=lambda samples: len(samples) // 2,
        head=ScalarHead(),
    ),
    "value": RewardCase(
        objective=ValuePretraining(value_loss=ValueLoss()),
        samples=answers_of,
        plain_loss=plain_values,
        denominator=num_loss_tokens,
        head=ScalarHead(),
    ),
    "process": process_case(is_restricted=True),
    "process, vocabulary": process_case(is_restricted=False),
}


def plain_model(case: RewardCase, model_dir: Path) -> PreTrainedModel:
    if case.head is None:
        return AutoModelForCausalLM.from_pretrained(model_dir / "lm", attn_implementation="eager").eval()
    return AutoModelForSequenceClassification.from_pretrained(model_dir, attn_implementation="eager").eval()


@functools.cache
def plain_training(name: str, model_dir: Path, precision: str) -> list[dict[str, Any]]:
    """Two steps: loss, gradients, masters. With "bf16" weights are rounded after each step."""
    case = CASES[name]
    masters = plain_model(case, model_dir)
    model = copy.deepcopy(masters)
    optimizer = torch.optim.AdamW(decay_groups(masters), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = []
    for step in range(NUM_STEPS):
        loss = case.plain_loss(model, case.samples(step))
        model.zero_grad()
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        for name, master in masters.named_parameters():
            master.grad = gradients[name].clone()
        torch.nn.utils.clip_grad_norm_(masters.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
                parameter.copy_(master.bfloat16() if precision == "bf16" else master)
        stepped = {name: p.detach().clone() for name, p in masters.named_parameters()}
        steps.append({"loss": loss.item(), "gradients": gradients, "masters": stepped})
    return steps
