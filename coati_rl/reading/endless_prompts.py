"""Draw the prompts of a run that has generators among its sources: there is always another one.

Prompts of files are drawn in passes, as `mixing` says. Row i of a generator follows from the run's seed and i; where it
cannot be used, because it is too long or the generator fails, another one takes its place, which follows from the same.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import xxhash

from coati_rl.errors import RunError
from coati_rl.reading.dataset import render_prompts
from coati_rl.reading.draw_order import DrawOrder, fingerprint, ground_truth_digest
from coati_rl.reading.generators import Generator
from coati_rl.reading.mixing import Interleaving, row_of_pass
from coati_rl.reading.tasks import Task, TaskRow
from coati_rl.types import Prompt

logger = logging.getLogger(__name__)

_ATTEMPTS = 16  # rows that are tried for one prompt
_ROWS = 1 << 24  # of each attempt
_NUM_COMPARED = 4  # prompts of a generator whose tokens a checkpoint is compared by


@dataclass(frozen=True, kw_only=True)
class GeneratedPrompts:
    """Make the prompts of one generator."""

    name: str  # that uids begin with
    generator: Generator
    task: Task
    tokenizer: Any
    max_prompt_tokens: int
    input_template: str | None

    def prompt(self, number: int) -> Prompt:
        """Return prompt `number`, from 0, with the uid `<name>-<number>`. Raises: RunError if no row can be used."""
        cause = f"all exceed --max-prompt-tokens {self.max_prompt_tokens}"
        for attempt in range(_ATTEMPTS):
            try:
                fields = self.generator.row(attempt * _ROWS + number)
            except Exception as error:  # noqa: BLE001 - of the package, which gives up on some rows
                cause = f"{type(error).__name__}: {error}"
                continue
            rows = [TaskRow(fields=fields, task=self.task)]
            (prompt,) = render_prompts(
                rows, self.tokenizer, name=self.name, first=number, input_template=self.input_template
            )
            if len(prompt.token_ids) <= self.max_prompt_tokens:
                if attempt:
                    logger.warning(
                        "%s-%d: row %d is used, those before cannot be: %s", self.name, number, attempt, cause
                    )
                return prompt
        spec = self.generator.spec
        raise RunError(
            f"reasoning_gym:{spec.name}: {_ATTEMPTS} rows were made for prompt {number}, and none can be used: "
            f"{cause}; raise --max-prompt-tokens, or choose other parameters"
        )

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest of the generator and its first prompts."""
        first = fingerprint([self.prompt(number) for number in range(_NUM_COMPARED)])
        return f"{self.generator.spec.key}:{first}"


class EndlessPrompts:
    """Implement `PromptSource`; uids are `<prompt uid>.<pass>`, with pass 0 for all generated prompts."""

    length = None

    def __init__(
        self, parts: Mapping[str, Sequence[Prompt] | GeneratedPrompts], *, seed: int, shares: Sequence[Fraction] = ()
    ) -> None:
        """Take the sources by name, and the share of each; one generator alone has none."""
        if len(parts) > 1 and len(shares) != len(parts):
            raise ValueError(f"{len(parts)} sources need as many shares, and have {len(shares)}")
        self._parts, self._seed = parts, seed
        self._names = [*parts]
        self._shares = tuple(shares) or (Fraction(1),)
        self._interleaving = Interleaving(self._shares)

    @cached_property
    def order(self) -> DrawOrder:
        """Return the draw order."""
        digest, texts = xxhash.xxh3_128(), list[str]()
        for name, share in zip(self._names, self._shares, strict=True):
            part = self._parts[name]
            of_part = part.fingerprint if isinstance(part, GeneratedPrompts) else fingerprint(part)
            digest.update(f"{name}={share}:{of_part};".encode())
            texts += [] if isinstance(part, GeneratedPrompts) else [ground_truth_digest(part)]
        truths = xxhash.xxh3_128_hexdigest(",".join(texts).encode())
        return DrawOrder(seed=self._seed, num_prompts=None, fingerprint=digest.hexdigest(), ground_truths=truths)

    def draw(self, number: int) -> Prompt:
        source, place = self._interleaving.at(number)
        part = self._parts[self._names[source]]
        if isinstance(part, GeneratedPrompts):
            prompt, passed = part.prompt(place), 0
        else:
            row, passed = row_of_pass(place, len(part), seed=self._seed, source=source)
            prompt = part[row]
        return replace(prompt, uid=f"{prompt.uid}.{passed}")

    def find(self, uid: str) -> Prompt:
        of_prompt, _, _ = uid.rpartition(".")
        name, _, number = of_prompt.rpartition("-")
        part = self._parts[name]
        if isinstance(part, GeneratedPrompts):
            return replace(part.prompt(int(number)), uid=uid)
        found = next((prompt for prompt in part if prompt.uid == of_prompt), None)
        if found is None:
            raise KeyError(uid)
        return replace(found, uid=uid)

    def first(self, num_prompts: int) -> list[Prompt]:
        """Return some of the first prompts of the run."""
        return [self.draw(number) for number in range(min(num_prompts, _NUM_COMPARED))]
