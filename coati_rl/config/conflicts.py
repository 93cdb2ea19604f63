"""Refuse settings that contradict each other: the table says which pairs, why, and what to do.

Rules that compare numbers, or that need more than two settings, are functions of the other files.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from coati_rl.algorithms.advantage import GAE, GDPO
from coati_rl.algorithms.choices import LOSSES_OF_SEQUENCES
from coati_rl.config.fields import described, spelling
from coati_rl.config.sections import JobConfig

_CUTS = "--top-k, --top-p, --min-p"
_URL = "-b *://*"
_TOOLS = "--env, --tools, --mcp-server"
_OWN_RATIO = "|".join((*LOSSES_OF_SEQUENCES, "*:*"))

# One side, the other side, and why, with a remedy. A side is a flag that is not at its default, or that has one of the
# values after it (VALUE|VALUE, with * and ?); of several flags one will do. {left} and {right} are the flags of a side
# with their defaults.
CONFLICTS = (
    (_TOOLS, "--agent-command", "the agent is the environment; leave one of them out"),
    ("--tools, --mcp-server", "--env", "an environment of your own calls tools itself; leave one out"),
    ("--input-template", "--tools, --mcp-server, --env textarena:*", "its turns are messages, which a chat template "
     "writes; leave it out, or use --chat-template"),
    ("--input-template", "--chat-template", "text is written by one of them; leave the other out"),
    ("--input-template", "--chat-template-kwargs", "no chat template reads them; leave one of the two out"),
    ("--input-template", "--system-prompt ?*", "write what it says in the template"),
    ("--stale-episodes cut", "--n-behind 0", "has no effect, as trainers wait for every prompt of a rollout step; use "
     "--n-behind 1, or leave it out"),
    ("--reward-combine", "--reward-type env", "rewards of turns are summed; leave it out"),
    ("--distill-only", "--advantage-estimator remax", "its greedy answers would be generated for nothing, as no reward "
     "is learned from; use --advantage-estimator reward"),
    ("--distill-only", f"--advantage-estimator {GAE}", "a critic learns from rewards; use another estimator"),
    (f"--advantage-estimator {GDPO}", "--reward-combine, --reward-normalize, --reward-clip, "
     "--soft-over-length-punishment", "it normalises each reward of -rt by itself, and this changes their sum; use "
     "group_norm, or leave the others out"),
    ("--turn-advantages", f"--advantage-estimator {GAE}", "it has the rewards of turns at their tokens; leave "
     "--turn-advantages out, --gamma discounts"),
    ("--turn-advantages", "--advantage-estimator remax", "samples are compared with the reward of a whole greedy "
     "episode, and turns have rewards of their own; leave one of the two out"),
    ("--turn-advantages", f"--advantage-estimator {GDPO}|opo, --reward-normalize, --reward-clip", "it changes the "
     "reward of a whole episode, and turns have rewards of their own; leave one of the two out"),
    ("--length-lambda", "--gae-lambda", "both set lambda of the advantages; leave one of them out"),
    ("--ratio-level sequence", f"--policy-loss {_OWN_RATIO}", "it forms its own ratio; use token"),
    ("--off-policy-correction, --on-logprob-gap", "--old-logprobs engine", "weighs the trainer's old_logprobs against "
     "the engine's, and here they are the same; use --old-logprobs trainer or auto"),
    # Probabilities over the tokens that sampling leaves are not compared with those over all tokens.
    ("--off-policy-correction, --on-logprob-gap", _CUTS, "divides the trainer's probability, over all tokens, by the "
     "engine's, renormalised over those that are left, so the weight would be biased; sample from all tokens "
     "({right}), or use {left}"),
    ("--off-policy-mask-threshold", _CUTS, "compares the trainer's probability, over all tokens, with the engine's, "
     "renormalised over those that are left; sample from all tokens ({right}), or leave it out"),
    ("--warmup-ratio", "--warmup-steps", "both set the length of the warm-up; give one"),
    ("--colocate", "--inflight-update", "no request runs when weights change; leave it out"),
    ("--colocate", _URL, "a server has devices of its own; leave --colocate out"),
    ("--lora-sync adapter", _URL, "a server gets whole weights; use --lora-sync merged"),
    ("--max-num-seqs", _URL, "has no effect; give --max-num-seqs to the server"),
    ("--router-replay", "-b fake|*://*", "it returns no routes; use -b vllm or -b transformers"),
    ("--partial-rollouts", "--n-behind 0", "no response is unfinished at the end of a rollout step there; use "
     "--n-behind 1 or more"),
    ("--partial-rollouts", "-b transformers", "it decodes a batch to its end; use -b vllm"),
    ("--partial-rollouts", f"{_TOOLS}, --agent-command", "its episodes hold their places while they wait for it; use "
     "--inflight-update, under which their turns go on with new weights"),
    ("--weight-transport nccl|ipc", "--join-port", "the run's own end has no GPU; use auto, gloo or file"),
    ("--join-port, --max-producers", f"--colocate, {_URL}", "its engines are those of -i; leave {left} out"),
    ("--join-port", "-ptp", "engines that join have one rank; use -ptp 1"),
    ("--reference-update", "--lora-rank, --adapter", "the reference is the model without the adapters, which does not "
     "move; leave it out, or train the weights"),
    ("--reference-update", "--ref-devices", "a reference that follows the policy lies with it; leave one of them out"),
    ("--ref-devices", "--precompute-reference", "the devices would have nothing to do after the first pass; leave one "
     "of them out"),
    ("--lora-sync adapter", "-b transformers", "it computes without adapters; use --lora-sync merged, or -b vllm"),
    ("--lora-sync adapter", "--quantization, --engine-arg *quantization?config=*", "its base would not be the "
     "trainers'; use --lora-sync merged, or leave it out"),
    ("--load-in-4bit", "--lora-sync adapter", "the engines' base would not be the trainers'; use --lora-sync merged, "
     "or leave --load-in-4bit out"),
    ("--load-in-4bit", "--export merged", "on the model as it is the adapter is another one than was trained; leave "
     "one of them out"),
    ("--load-in-4bit", "--plugin fsdp2", "its rows are not sharded; use --plugin hybrid, or leave it out"),
    ("--load-in-4bit", "-tp", "weights in 4 bits are not cut; use -tp 1, with -pp or copies of the model, or leave it "
     "out"),
    ("-zero 2", "-pp", "stage 2 hands a gradient out as soon as it is made, and a pipeline makes it in several "
     "backward passes; use -zero 1 or -pp 1"),
    ("-zero", "--precision fp32", "ZeRO keeps float32 masters of bfloat16 weights; use --precision bf16 or -zero 0"),
    ("--plugin fsdp2", "-pp, -zero", "it shards weights, gradients and optimizer states over trainers, and has neither "
     "stages nor ZeRO beside; use {right} or --plugin hybrid"),
    ("--fsdp-size", "--plugin hybrid", "it has no such shards; use --plugin fsdp2 or --fsdp-size 0"),
    ("--expert-parallel", "--plugin hybrid", "tokens are exchanged between trainers that FSDP2 keeps in step; use "
     "--plugin fsdp2 or --expert-parallel 1"),
    ("--expert-parallel", "-tp", "both share experts out; use -tp 1 or --expert-parallel 1"),
    ("--best-of", "--pairs", "a pair has the best sample and another one; use one of them"),
    ("--pairs", "--reward-template", "a pair has two rewards; use one of them"),
    ("-g", "-temp 0", "greedy samples of a prompt are all the same; use -g 1"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Flag:
    """A flag of a side, as the table has it."""

    text: str
    name: str  # of its field
    values: tuple[str, ...]  # patterns of those that count; none: all but the default
    default: Any

    def given(self, value: Any) -> str | None:
        """Return the flag with its value, as a message names it; None if the value is no conflict."""
        shown = _text(value)
        is_wanted = any(fnmatchcase(shown, each) for each in self.values) if self.values else value != self.default
        if value is None or not is_wanted:
            return None
        is_named = not isinstance(value, bool) and re.fullmatch(r"\S{1,99}" if self.values else r"[\w.,=:-]+", shown)
        return f"{self.text} {shown}" if is_named else self.text

    @property
    def off(self) -> str:
        """Return the flag with its default."""
        has_value = isinstance(self.default, str | int | float) and not isinstance(self.default, bool)
        return f"{self.text} {_text(self.default)}" if has_value or self.default is None else self.text


def conflict_problems(config: JobConfig) -> Iterator[str]:
    """Yield the contradictions between two settings, each with a remedy."""
    values = config.values()
    for left, right, why in _table(type(config)):
        of_left, of_right = (
            {flag: text for flag in side if (text := flag.given(values[flag.name]))} for side in (left, right)
        )
        if of_left and of_right:
            why = why.format(left=_off(of_left), right=_off(of_right))
            yield f"{' and '.join(of_left.values())} with {' and '.join(of_right.values())}: {why}"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else " ".join(value) if isinstance(value, list) else str(value)


def _off(flags: Iterable[_Flag]) -> str:
    return " ".join(flag.off for flag in flags)


@cache
def _table(job: type[JobConfig]) -> list[tuple[list[_Flag], list[_Flag], str]]:
    """Return the table with the fields of a job; flags that it lacks are left out."""
    fields = {described(field, "short") or spelling(name, field): (name, field) for name, field in job.fields().items()}
    fields |= {spelling(name, field): (name, field) for name, field in job.fields().items()}

    def flags(side: str) -> Iterator[_Flag]:
        for text, _, values in (each.partition(" ") for each in side.split(", ")):
            if text in fields:
                name, field = fields[text]
                patterns = tuple(values.split("|")) if values else ()
                yield _Flag(text, name, patterns, field.get_default(call_default_factory=True))

    return [([*flags(left)], [*flags(right)], why) for left, right, why in CONFLICTS]
