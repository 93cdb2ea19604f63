"""Name the model that is trained, its source and its precision."""

from typing import Literal

from pydantic import BaseModel

from coati_rl.config.fields import flag


class ModelConfig(BaseModel):
    """The policy's checkpoint and its numbers."""

    model: str = flag("Qwen/Qwen2.5-7B", "Model directory in HF format, or a hub id.", short="-m")
    checkpoint_path: str | None = flag(None, "Checkpoint directory of this project to resume from.", short="-cp")
    precision: Literal["fp32", "bf16"] | None = flag(
        None,
        "Precision of trainer, engine and weight wire; bf16 keeps fp32 masters. Default: bf16 on GPUs and with ZeRO.",
    )
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "Where engines and trainers run; auto takes GPUs if any.")
