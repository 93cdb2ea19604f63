"""Define what a task sets for its own rows: reward, system prompt, ground truth and sampling.

A task is a name and the settings that differ from the run's; what it leaves out, it has from the run's own flags. Rows
that name no task are of the task "default".
"""

import re
from typing import Any

from pydantic import ConfigDict, Field, model_serializer

from coati_rl.config.fields import Settings
from coati_rl.config.reward import OwnFunction, RewardType
from coati_rl.config.sampling import StopTexts, Temperature
from coati_rl.reward_spec import MathAnswer

_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


class TaskConfig(Settings):
    """Hold the settings of one task, each with the meaning and the bounds of the run's flag of the same name.

    Defaults are never read: a setting that is not given is the run's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    reward_type: RewardType = ""
    reward_combine: OwnFunction = None
    math_answer: MathAnswer = "number"
    correct_from: float = 1.0
    answer_key: str | None = None
    system_prompt: str | None = None  # None: that of the task's reward type
    temperature: Temperature = Field(1.0, gt=0)
    top_k: int | None = Field(None, ge=1)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    max_new_tokens: int = Field(1, ge=1)
    stop: StopTexts = Field([])

    @property
    def given(self) -> dict[str, Any]:
        """Return what the task sets, by the names of the run's settings."""
        return {name: getattr(self, name) for name in TaskConfig.model_fields if name in self.model_fields_set}

    @model_serializer
    def _as_given(self) -> dict[str, Any]:
        return self.given  # defaults in a file would be settings when it is read again


def check_name(name: str) -> None:
    """Raise ValueError for a name that cannot be part of a metric's name and of a file's."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} names no task: use letters, digits, '_', '-', '.' and '+'")
