"""Try a run's adapters on the model's modules before anything starts, without the memory of its weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from coati_rl.checkpoint.saved_adapter import check_base
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from consumer.adapters.adapters import adapter_infos, check_tensors
from consumer.adapters.lm_head import untie_lm_head
from consumer.parallel.layout import Layout
from consumer.parallel.parameters import describe_parameters


def check_adapters(config: TrainingConfig, hf_config: Any) -> None:
    """Raise ConfigError if the model lacks a layer of --lora-targets, or --adapter does not fit it.

    Args:
        config: of the job, with the rank and layers of --adapter.
        hf_config: of the model.
    """
    if not config.lora.is_on:
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    takes_lm_head, is_run = config.lora.adapter is not None, not isinstance(config, OfflineConfig)
    if takes_lm_head and untie_lm_head(model, config.lora.spec.targets) and is_run:
        raise ConfigError(
            f"--adapter {config.lora.adapter}: adapts the LM head, which is the embedding of this model and of its "
            "engines; merge it into its base (coati-rl merge), and give that as --model"
        )
    infos = describe_parameters(model, Layout(), [model.config.get_text_config().num_hidden_layers])
    factors = adapter_infos(model, infos, config.lora.spec, takes_lm_head=takes_lm_head)
    if config.lora.adapter is None:
        return
    if isinstance(config, OfflineConfig) and config.HAS_SCALAR_HEAD:
        raise ConfigError(
            f"--adapter {config.lora.adapter} with {config.COMMAND}: a new scalar head has no adapter to begin with; "
            "merge it into its base (coati-rl merge), and give that as --model"
        )
    adapter, where = Path(config.lora.adapter), f"--adapter {config.lora.adapter}"
    check_tensors(adapter, where, factors)
    check_base(adapter, Path(config.model.model), where)
