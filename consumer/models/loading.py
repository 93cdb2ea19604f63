"""Read a Hugging Face model directory without running any code from it, and prepare the model for training."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as hf_logging

from coati_rl.errors import ConfigError
from coati_rl.ops.cpu_products import use_fast_products
from consumer.models import packed_attention


def read_config(model_dir: Path) -> Any:
    """Return the transformers config. Raises: ConfigError if it cannot be read."""
    try:
        return AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _unreadable(model_dir, error) from error


def attention_of(config: Any) -> str:
    """Return the name of the attention function that trainers use for a model."""
    return packed_attention.NAME if config.model_type in packed_attention.MODEL_TYPES else "sdpa"


def read_model(auto_class: Any, model_dir: Path, config: Any, *, dtype: torch.dtype, **arguments: Any) -> Any:
    """Return what `auto_class.from_pretrained` returns. Raises: ConfigError if it cannot be loaded.

    Attention separates packed samples without a mask where `packed_attention` supports the architecture.
    """
    try:
        with no_progress_bars():
            return auto_class.from_pretrained(
                model_dir,
                config=config,
                dtype=dtype,
                attn_implementation=attention_of(config),
                trust_remote_code=False,
                **arguments,
            )
    except (OSError, ValueError) as error:
        raise _unreadable(model_dir, error) from error


def prepare(model: PreTrainedModel, *, gradient_checkpointing: bool) -> PreTrainedModel:
    """Set eval mode: with dropout log-probabilities, and thus ratios, would be random. Products are the fastest ones.

    With `gradient_checkpointing` the backward recomputes each decoder layer's activations.
    """
    model.eval()
    use_fast_products(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                _checkpoint_in_eval_mode(module)
    return model


def _unreadable(model_dir: Path, error: Exception) -> ConfigError:
    return ConfigError(f"--model {model_dir} cannot be loaded: {error}")


def _checkpoint_in_eval_mode(layer: GradientCheckpointingLayer) -> None:
    """Set training mode only for the layer's checkpointing check; inside the forward it would enable OPT's dropout."""
    layer.training = True
    layer.register_forward_pre_hook(lambda layer, _: setattr(layer, "training", False))
    # always_call: recomputation leaves the forward by an exception as soon as it has the tensors it needs.
    layer.register_forward_hook(lambda layer, *_: setattr(layer, "training", True), always_call=True)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars, which would overwrite the run's own progress display."""
    were_on = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            hf_logging.enable_progress_bar()
