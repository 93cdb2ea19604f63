"""Write adapters with PEFT, whose products are not zero."""

import copy
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import PreTrainedModel


def save_adapter(
    directory: Path,
    model: PreTrainedModel,
    *,
    seed: int = 1,
    std: float = 0.05,
    task: str = "CAUSAL_LM",
    **settings: Any,
) -> PreTrainedModel:
    """PEFT's directory of an adapter of rank 4 and scale 2. Returns: PEFT's merged model, in float32."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": task, **settings})
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=std) if std else parameter.zero_()
            elif "modules_to_save" in name:
                parameter.add_(0.1)
    adapted.save_pretrained(directory)
    merged: PreTrainedModel = adapted.float().merge_and_unload()
    return merged
