"""Hold the inputs of a run with producers; without torch, as its coordinator gets them."""

from collections.abc import Sequence
from dataclasses import dataclass

from coati_rl.checkpoint.resume import ResumePoint
from coati_rl.config import Config
from coati_rl.config.plan import Plan
from coati_rl.preflight.prepared import PreparedJob
from coati_rl.reading.dataset import PromptSet
from coati_rl.reading.prompt_source import PromptSource
from coati_rl.reading.streamed_prompts import StreamedPrompts
from coati_rl.types import Prompt

NUM_READ = 2000  # prompts, for their mean length, and of streamed ones for warnings about them


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared(PreparedJob):
    """Hold the inputs of a run with producers."""

    config: Config
    plan: Plan
    train: PromptSet  # of files
    source: PromptSource | None  # None in a dry run without the model's tokenizer
    evaluation: dict[str, PromptSet]
    resume: ResumePoint | None = None
    generated_tasks: tuple[str, ...] = ()  # of training rows

    @property
    def read_prompts(self) -> Sequence[Prompt]:
        """Return the training prompts of files; where they are streamed, some of the first ones."""
        prompts = self.train.prompts
        return prompts[:NUM_READ] if isinstance(prompts, StreamedPrompts) else prompts

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return the tasks of the training prompts, in the order in which they are defined."""
        prompts = self.train.prompts
        used = {*prompts.tasks} if isinstance(prompts, StreamedPrompts) else {prompt.task for prompt in prompts}
        used |= {*self.generated_tasks}
        return tuple(name for name in self.config.by_task if name in used)
