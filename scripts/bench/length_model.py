"""Create an untrained tiny model whose responses have a chosen distribution of lengths, and prompts for it.

    python scripts/bench/length_model.py OUT_DIR --lengths uniform|geometric [--mean 61] [--num-prompts 512] [--seed 0]

Out: OUT_DIR holds a Hugging Face checkpoint (Qwen3, untied head, 374 thousand parameters, one token a byte, a chat
template) and `prompts.jsonl` in the project's format. `geometric`: every token is the end with probability 1/mean,
whatever came before, so that lengths are geometric. `uniform`: no response ends, and all have --max-new-tokens tokens.

Method: component 0 of the hidden states is the same large constant in every embedding, and no layer writes to it; it
dominates the norm of the final RMSNorm, so that it stays constant. lm_head[end, 0] holds the log-odds of the end; for
bytes this entry is 0. The bytes' logits are small and random, so that their log-sum is nearly constant.
"""

import argparse
import json
import math
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END, PAD, START = "<|end|>", "<|pad|>", "<|start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)
CONSTANT = 64.0  # component 0; the others are of order 1
NEVER = -40.0  # log-odds of a token that is not drawn
NUM_PROBES, PROBE_TOKENS = 64, 64  # random contexts from which the head is set


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Create a tokenizer with one token per byte and three special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, PAD, START])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE, padding_side="left"
    )


def make_model(tokenizer: PreTrainedTokenizerFast, *, end_probability: float, seed: int) -> Qwen3ForCausalLM:
    """Create a model that ends its response with this probability at every token; 0: never."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=272,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings.normal_()
        embeddings[:, 0] = CONSTANT
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
    _set_log_odds(model, tokenizer, end_probability)
    return model


def end_probabilities(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, token_ids: Tensor) -> Tensor:
    """Return the probability of the end after every token, float32[B, T], for token ids int64[B, T]."""
    with torch.no_grad():
        return model(input_ids=token_ids).logits.softmax(dim=-1)[..., tokenizer.eos_token_id]


def random_contexts(seed: int) -> Tensor:
    """Return random bytes as token ids, int64[B, T]."""
    return torch.randint(0, 256, (NUM_PROBES, PROBE_TOKENS), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _set_log_odds(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, end_probability: float) -> None:
    """Solve lm_head[token, 0] * component 0 = log-odds + log-sum of the bytes' logits, in the mean over contexts."""
    hidden = model.model(input_ids=random_contexts(seed=0)).last_hidden_state
    logits = model.lm_head(hidden)
    constant, log_sum = hidden[..., 0].mean(), logits[..., :256].logsumexp(dim=-1).mean()
    log_odds = math.log(end_probability / (1 - end_probability)) if end_probability else NEVER
    head = model.lm_head.weight
    for token, value in ((END, log_odds), (PAD, NEVER), (START, NEVER)):
        index = tokenizer.convert_tokens_to_ids(token)
        head[index] = 0.0
        head[index, 0] = (value + log_sum) / constant


def prompt_rows(count: int, *, seed: int) -> list[dict[str, object]]:
    """Return rows of additions with prompts of equal length."""
    rng = random.Random(seed)
    pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(count)]
    return [{"messages": {"role": "user", "content": f"{a} + {b} = ?"}, "gt_answer": str(a + b)} for a, b in pairs]


def main() -> None:
    """Create and save model and prompts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--lengths", choices=("uniform", "geometric"), required=True)
    parser.add_argument("--mean", type=float, default=61.0, help="of geometric lengths, in tokens with the end")
    parser.add_argument("--num-prompts", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    end_probability = 1 / arguments.mean if arguments.lengths == "geometric" else 0.0
    model = make_model(tokenizer, end_probability=end_probability, seed=arguments.seed)
    tokenizer.save_pretrained(arguments.out_dir)
    model.save_pretrained(arguments.out_dir)
    rows = prompt_rows(arguments.num_prompts, seed=arguments.seed)
    (arguments.out_dir / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = end_probabilities(model, tokenizer, random_contexts(seed=1))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{arguments.out_dir}: {num_parameters:,} parameters, "
        f"probability of the end {found.mean():.5f} (from {found.min():.5f} to {found.max():.5f})"
    )


if __name__ == "__main__":
    main()
