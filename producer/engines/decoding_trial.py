"""Try whether the transformers engine can decode an architecture in batches, before anything starts.

It decodes with left-padded prompts and a cache of which it drops finished rows. Some caches cannot do that, and some
layers read the padding: a `tiny_model` of the architecture must give what it gives for each sample alone.
"""

from pathlib import Path

import torch

from coati_rl.errors import ConfigError
from coati_rl.preflight.tiny_model import FIRST_TOKEN, tiny_model
from coati_rl.types import SamplingParams
from producer.engines.decoding import DecodingBatch, Row

_PROMPTS = ((3, 9, 5, 12, 7, 10, 4), (8, 3, 6))
_NUM_TOKENS = (3, 6)  # the first row finishes, and is dropped, before the second
TOLERANCE = 1e-3  # nats, float32: sums are padded and ordered in other ways


def check_decoding(directory: Path, *, flag: str = "--model") -> None:
    """Raise ConfigError, which names `flag`, if the transformers engine cannot decode the model in `directory`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    try:
        model = tiny_model(config, AutoModelForCausalLM.from_config)
        difference = decoding_difference(model)
    except Exception as error:
        raise _refusal(directory, flag, config.model_type, f"{type(error).__name__}: {error}") from error
    if not difference <= TOLERANCE:
        reason = f"log-probabilities of padded prompts are off by {difference:.2g} nats"
        raise _refusal(directory, flag, config.model_type, reason)


def decoding_difference(model: torch.nn.Module) -> float:
    """Return the largest difference of sampled log-probabilities from those of each sample alone, nats."""
    rows = [
        Row(
            request_id=str(number),
            index=0,
            prompt=tuple(FIRST_TOKEN + token for token in prompt),
            sampling=SamplingParams(max_new_tokens=size, seed=number),
            max_tokens=size,
            generator=torch.Generator().manual_seed(number),
        )
        for number, (prompt, size) in enumerate(zip(_PROMPTS, _NUM_TOKENS, strict=True))
    ]
    batch = DecodingBatch(model, rows, eos_token_ids=frozenset(), decode=lambda token_ids: "")
    while not batch.is_done():
        batch.step(0)
    return max(_distance(model, row) for row in rows)


@torch.no_grad()
def _distance(model: torch.nn.Module, row: Row) -> float:
    tokens = torch.tensor([[*row.prompt, *row.token_ids]])
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(row.prompt) - 1 : -1].float()
    alone = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(row.token_ids)[:, None])[:, 0]
    return (alone - torch.tensor(row.logprobs)).abs().max().item()


def _refusal(directory: Path, flag: str, architecture: str, reason: str) -> ConfigError:
    return ConfigError(
        f"--backend transformers: it cannot generate with {flag} {directory}, a {architecture} ({reason}); "
        "use --backend vllm"
    )
