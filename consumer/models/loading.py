"""Read a Hugging Face model directory without running any code from it, and prepare the model for training."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from coati_rl.errors import ConfigError
from coati_rl.model_files.names import NameDifferences
from coati_rl.model_files.quiet import no_progress_bars
from coati_rl.model_files.stored import read_stored
from coati_rl.model_files.values import HEAD, check_finite
from coati_rl.ops.cpu_products import use_fast_products
from consumer.models import packed_attention

_TRAINED = frozenset(
    {torch.float32, torch.bfloat16, torch.float16}
)  # dtypes of files that are converted after sharding


def attention_of(config: Any) -> str:
    """Return the name of the attention function that trainers use for a model."""
    return packed_attention.NAME if config.model_type in packed_attention.MODEL_TYPES else "sdpa"


def read_model(
    auto_class: Any, model_dir: Path, config: Any, *, dtype: torch.dtype, has_new_head: bool = False
) -> tuple[Any, frozenset[str]]:
    """Load a model, with every tensor of its files and no other, of finite values.

    Attention separates packed samples without a mask where `packed_attention` supports the architecture. A head that is
    not the embedding although config.json says so is kept, and the model's config says so.

    Parameters are maps of the files and have the files' dtype, so that the trainers of a node share their memory; a
    rank converts its part after sharding. Files of several dtypes, or of one that must be computed (a quantised model),
    are converted here.

    Args:
        auto_class: of transformers, such as AutoModelForCausalLM.
        model_dir: of the model.
        config: its transformers config.
        dtype: to train in; the model's `config.dtype` afterwards, and that of its buffers.
        has_new_head: the files may lack the head, and have another.
    Returns: the model, and the names of the parameters that are not in the files: of a new head.
    Raises: ConfigError if it cannot be loaded, naming tensors that are missing, unknown, mis-shaped or not finite.
    """
    where = f"--model {model_dir}"
    tensors = {name: each.meta for name, each in read_stored(model_dir, where).items()}
    read_dtype = _mapped_dtype(tensors, config, dtype)
    try:
        with no_progress_bars():
            model, report = auto_class.from_pretrained(
                model_dir,
                config=config,
                dtype=read_dtype,
                attn_implementation=attention_of(config),
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # which are refused by name
            )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise _unreadable(model_dir, error) from error
    NameDifferences.of_report(model, report, tensors, has_new_head=has_new_head).check(where)
    check_finite(model.named_parameters(), where)
    if read_dtype != dtype:
        _replace_buffers(model, auto_class, dtype)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and getattr(model.config, "tie_word_embeddings", False):
        model.config.tie_word_embeddings = head.weight is embeddings.weight
    return model, frozenset(report["missing_keys"])


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


def saved_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return what a checkpoint holds besides parameters, such as Gemma 4's `layer_scalar`: copies on the CPU."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: each.cpu().clone() for name, each in model.state_dict().items() if name not in parameters}


def convert(model: PreTrainedModel) -> None:
    """Convert parameters to the dtype that the model was read for, after sharding, when a rank has only its own part.

    Those that are trained get memory of their own in place of a map of the model's files. On a CPU a mapped tensor's
    address depends on the file's other tensors, and matrix products round by address: training would differ between a
    model and its checkpoint.
    """
    for parameter in model.parameters():
        if not parameter.is_floating_point():  # in 4 bits, two numbers a byte
            continue
        copies = parameter.requires_grad and parameter.device.type == "cpu" and not _has_own_memory(parameter.data)
        parameter.data = parameter.data.to(model.config.dtype, copy=copies)


def take_own_memory(model: PreTrainedModel) -> None:
    """Copy parameters that are maps of files: those of a frozen model that takes the weights of a trained one.

    The first time that it does the system would copy them page by page, to addresses by which products round.
    """
    for parameter in model.parameters():
        local: Any = getattr(parameter, "_local_tensor", parameter)
        if not local.untyped_storage().resizable():
            parameter.data = parameter.data.clone()


def convert_shards(module: nn.Module, dtype: torch.dtype) -> None:
    """Give parameters that are views of whole tensors memory of their own, in a dtype."""
    for parameter in module.parameters():
        is_own = _has_own_memory(parameter.data)
        parameter.data = parameter.data.to(dtype, copy=not is_own, memory_format=torch.contiguous_format)


def _has_own_memory(tensor: Tensor) -> bool:
    """Return True if a tensor is all that is in its memory, and that is no map of a file: the copy of a shard."""
    storage: Any = getattr(tensor, "_local_tensor", tensor).untyped_storage()  # of a DTensor
    return storage.resizable() and storage.nbytes() == tensor.numel() * tensor.itemsize


def _unreadable(model_dir: Path, error: Exception) -> ConfigError:
    return ConfigError(f"--model {model_dir} cannot be loaded: {error}")


def _mapped_dtype(tensors: Mapping[str, Tensor], config: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors need no conversion to be read; `dtype` if there is none."""
    dtypes = {each.dtype for each in tensors.values() if each.is_floating_point()}
    is_one = len(dtypes) == 1 and dtypes <= _TRAINED and getattr(config, "quantization_config", None) is None
    # Whether such a head equals the embedding, and is the embedding then, is seen in `dtype`; see `has_own_head`.
    may_be_tied = getattr(config, "tie_word_embeddings", False) and any(name.endswith(HEAD) for name in tensors)
    return dtypes.pop() if is_one and not may_be_tied else dtype


class _EmptyWithoutMemory(TorchFunctionMode):
    """Make tensors without values, such as a layer's weights, on the device that has no memory.

    `init_empty_weights` moves a weight there after it was made: on the C library's heap that leaves gaps between the
    modules' small objects, with huge pages more than half of a second model on each rank.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({**kwargs, "device": "meta"} if func is torch.empty else kwargs))


@torch.no_grad()
def _replace_buffers(model: PreTrainedModel, auto_class: Any, dtype: torch.dtype) -> None:
    """Give a model that was read in another dtype the buffers, and the config, of one that was read in `dtype`."""
    stored = model.state_dict()

    def build(context: AbstractContextManager[Any]) -> Any:
        with no_init_weights(), init_empty_weights(include_buffers=False), context:
            attention = model.config._attn_implementation
            return auto_class.from_config(model.config, dtype=dtype, attn_implementation=attention)

    as_read = build(_EmptyWithoutMemory())
    if any(buffer.is_meta and name not in stored for name, buffer in as_read.named_buffers()):
        # It was filled in after `torch.empty`.
        as_read = build(nullcontext())
    for name, buffer in as_read.named_buffers():
        owner, _, key = name.rpartition(".")
        value = stored[name].to(buffer.dtype) if name in stored else buffer
        setattr(model.get_submodule(owner), key, value)
    model.config.dtype = dtype


def _checkpoint_in_eval_mode(layer: GradientCheckpointingLayer) -> None:
    """Set training mode only for the layer's checkpointing check; inside the forward it would enable OPT's dropout."""
    layer.training = True
    layer.register_forward_pre_hook(lambda layer, _: setattr(layer, "training", False))
    # always_call: recomputation leaves the forward by an exception as soon as it has the tensors it needs.
    layer.register_forward_hook(lambda layer, *_: setattr(layer, "training", True), always_call=True)
