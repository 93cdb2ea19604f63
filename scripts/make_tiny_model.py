"""Create a tiny Qwen3 model that partly solves a task, dense or of experts, and the prompt files to train it further.

    python scripts/make_tiny_model.py OUT_DIR [--task arithmetic | code] [--seed 0] [--tied | --untied] [--steps 200]
    python scripts/make_tiny_model.py OUT_DIR --num-experts 8

Out: OUT_DIR holds an ordinary Hugging Face checkpoint (config, safetensors, tokenizer with chat template, generation
config) and `train.jsonl`, `eval.jsonl` in the project's math or code format; with `--num-conversations`, `sft.jsonl`
too, further examples of the warm-up's teacher as conversations. The warm-up is supervised training on the
solutions of a careless teacher, who omits most carries (arithmetic), or always adds (code). Greedy decoding then solves
the problems without a carry, 30-50 % of the held-out ones (for code the additions, a sixth). The correct solution
remains the model's second choice, which reinforcement learning can find.
With one thread and one seed the result is deterministic on one machine.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import arithmetic_task
import code_task
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

MAX_POSITIONS = 4096
TinyModel = Any  # a Qwen3ForCausalLM or a Qwen3MoeForCausalLM
Problem = arithmetic_task.Problem | code_task.Problem
Lessons = tuple[Sequence[Problem], Sequence[Problem], Iterator[Problem]]
TASKS: dict[str, Callable[..., Lessons]] = {"arithmetic": arithmetic_task.make_lessons, "code": code_task.make_lessons}
# Range of greedy accuracy: neither too low nor too high for reinforcement learning.
TARGET_ACCURACY = {"arithmetic": (0.3, 0.5), "code": (0.1, 0.5)}
MAX_ANSWER_TOKENS = 32
EOS, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IGNORED_LABEL = -100  # ignored by transformers' loss


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", type=Path, help="folder to write the checkpoint and the prompt files to")
    parser.add_argument("--task", choices=TASKS, default="arithmetic", help="task that the model partly learns")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data and order")
    embeddings = parser.add_mutually_exclusive_group()
    embeddings.add_argument("--tied", action="store_true", default=True, help="shared embeddings (default)")
    embeddings.add_argument("--untied", dest="tied", action="store_false", help="separate output embedding")
    parser.add_argument("--num-layers", type=int, default=2, help="decoder layers")
    parser.add_argument("--hidden-size", type=int, default=128, help="width; always 4 attention heads of 32")
    parser.add_argument("--num-experts", type=int, default=0, help="a Qwen3-MoE with so many, 2 a token; 0: dense")
    parser.add_argument("--vocab-size", type=int, default=512, help="tokens, 256 bytes and 3 special ones included")
    parser.add_argument("--steps", type=int, default=200, help="training steps; 0 leaves the model random")
    parser.add_argument("--batch-size", type=int, default=64, help="examples per training step")
    parser.add_argument("--careless-rate", type=float, default=0.7, help="fraction of carelessly solved examples")
    parser.add_argument("--num-train", type=int, default=16384, help="rows of train.jsonl")
    parser.add_argument("--num-eval", type=int, default=256, help="rows of eval.jsonl")
    parser.add_argument("--num-conversations", type=int, default=0, help="rows of sft.jsonl; 0: no such file")
    return parser.parse_args()


def make_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer: no unknown token, one token per digit, and merges across words.

    Text is not split into words before merging: with such uniform sentences a prompt has 17 tokens instead of 46.
    """
    tokenizer = Tokenizer(models.BPE())
    one_per_digit = pre_tokenizers.Split(Regex(r"\d"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [one_per_digit, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=EOS,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def chat(problem: Problem) -> list[dict[str, str]]:
    """Return the messages that a training run sends for `problem`."""
    return [{"role": "system", "content": problem.system_prompt}, {"role": "user", "content": problem.question}]


def conversation(problem: Problem) -> dict[str, list[dict[str, str]]]:
    """Return a line of sft.jsonl: the prompt, answered with the teacher's solution."""
    return {"messages": [*chat(problem), {"role": "assistant", "content": problem.solution}]}


def prompt_text(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> str:
    """Render the prompt of `problem`, up to and including the generation prompt."""
    return str(tokenizer.apply_chat_template(chat(problem), tokenize=False, add_generation_prompt=True))


def tokenizer_texts(sample: Iterable[Problem]) -> Iterable[str]:
    """Yield the texts that the tokenizer is trained on: the parts of a chat between special tokens."""
    for problem in sample:
        yield from (
            f"system\n{problem.system_prompt}",
            f"user\n{problem.question}",
            "assistant\n",
            problem.solution,
            "\n",
        )


def make_model(tokenizer: PreTrainedTokenizerFast, arguments: argparse.Namespace) -> TinyModel:
    """Create a randomly initialised Qwen3 of the requested size; two experts a token are as wide as a dense MLP."""
    experts = {
        "num_experts": arguments.num_experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 2 * arguments.hidden_size,
        "norm_topk_prob": True,
    }
    of_class: Callable[..., Any] = partial(Qwen3MoeConfig, **experts) if arguments.num_experts else Qwen3Config
    config = of_class(
        vocab_size=arguments.vocab_size,
        hidden_size=arguments.hidden_size,
        intermediate_size=4 * arguments.hidden_size,
        num_hidden_layers=arguments.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's CPU attention supports only some sizes; 32 works
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=arguments.tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    model = (Qwen3MoeForCausalLM if arguments.num_experts else Qwen3ForCausalLM)(config)
    model.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def collate(tokenizer: PreTrainedTokenizerFast, batch: list[Problem]) -> dict[str, Tensor]:
    """Return right-padded rows of prompt + answer, int64[B, T] each; only the answer's tokens have labels."""
    prompts = tokenizer([prompt_text(tokenizer, problem) for problem in batch])["input_ids"]
    answers = tokenizer([problem.solution + IM_END for problem in batch])["input_ids"]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    input_ids = torch.full((len(batch), width), tokenizer.pad_token_id)
    labels = torch.full((len(batch), width), IGNORED_LABEL)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return {"input_ids": input_ids, "labels": labels}


@torch.inference_mode()
def greedy_accuracy(model: TinyModel, tokenizer: PreTrainedTokenizerFast, held_out: Sequence[Problem]) -> float:
    """Return the fraction of `held_out` whose greedy completion ends as a correct solution."""
    texts = [prompt_text(tokenizer, problem) for problem in held_out]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
    completions = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    num_right = sum(text.endswith(problem.ending) for text, problem in zip(completions, held_out, strict=True))
    return num_right / len(held_out)


def make_optimizers(model: TinyModel) -> list[tuple[torch.optim.Optimizer, float]]:
    """Create Muon for the layers' matrices and AdamW for the rest, each with its peak learning rate.

    Measured with one seed, constant rates and an easier task (operands to 49): 44 % after 100 steps, with AdamW alone
    after about 210.
    """
    matrices = [p for name, p in model.named_parameters() if _is_matrix(name, p)]
    others = [p for name, p in model.named_parameters() if not _is_matrix(name, p)]
    return [
        (torch.optim.Muon(matrices, weight_decay=0.01), 0.02),
        (torch.optim.AdamW(others, weight_decay=0.01), 3e-3),
    ]


def _is_matrix(name: str, parameter: Tensor) -> bool:
    """Return True for a matrix of a layer, but for a router's; experts are one parameter of three dimensions."""
    return parameter.ndim == 2 and "layers" in name and ".gate." not in name


def warm_up(
    model: TinyModel,
    tokenizer: PreTrainedTokenizerFast,
    training: Iterable[Problem],
    *,
    num_steps: int,
    batch_size: int,
) -> None:
    """Train on `training`; the learning rates increase for 10 steps and then decrease linearly to zero."""
    stream = iter(training)
    optimizers = make_optimizers(model)
    for step in told(range(num_steps)):
        model(**collate(tokenizer, list(islice(stream, batch_size)))).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak_rate in optimizers:
            optimizer.param_groups[0]["lr"] = peak_rate * min((step + 1) / 10, 1 - step / num_steps)
            optimizer.step()
            optimizer.zero_grad()


def told(steps: range, *, every_s: float = 30.0) -> Iterator[int]:
    """Yield the steps, and say every `every_s` seconds how far they are: a busy machine takes minutes."""
    last = time.perf_counter()
    for step in steps:
        if (now := time.perf_counter()) - last >= every_s:
            print(f"training: step {step} of {len(steps)}", file=sys.stderr)
            last = now
        yield step


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Create data, tokenizer and model; train; save."""
    arguments = parse_arguments()
    started = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    prompts, held_out, lessons = TASKS[arguments.task](
        rng, num_train=arguments.num_train, num_eval=arguments.num_eval, careless_rate=arguments.careless_rate
    )
    tokenizer = make_tokenizer(tokenizer_texts(prompts[:2000]), vocab_size=arguments.vocab_size)
    model = make_model(tokenizer, arguments)
    warm_up(model, tokenizer, lessons, num_steps=arguments.steps, batch_size=arguments.batch_size)
    accuracy = greedy_accuracy(model, tokenizer, held_out)
    arguments.out_dir.mkdir(parents=True, exist_ok=True)
    write_rows(arguments.out_dir / "train.jsonl", [problem.row() for problem in prompts])
    write_rows(arguments.out_dir / "eval.jsonl", [problem.row() for problem in held_out])
    if arguments.num_conversations:
        taught = islice(lessons, arguments.num_conversations)
        write_rows(arguments.out_dir / "sft.jsonl", [conversation(problem) for problem in taught])
    tokenizer.save_pretrained(arguments.out_dir)
    model.save_pretrained(arguments.out_dir)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    seconds = time.perf_counter() - started
    print(
        f"{arguments.out_dir}: {num_parameters:,} parameters, {arguments.steps} steps, "
        f"greedy accuracy {accuracy:.3f} on {len(held_out)} held-out problems, {seconds:.0f} s"
    )
    low, high = TARGET_ACCURACY[arguments.task]
    if arguments.steps and not low <= accuracy <= high:
        print(
            f"warning: greedy accuracy {accuracy:.0%} is not within {low:.0%}-{high:.0%}; try another --seed",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
