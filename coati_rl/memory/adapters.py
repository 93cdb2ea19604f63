"""Count what adapters change of a trainer's memory: what is trained, what autograd keeps, and how the base is held."""

from dataclasses import dataclass
from typing import Any

from coati_rl.memory.model_shape import LinearLayer, ModelShape, linear_layers
from coati_rl.model_files.adapter_files import ALL_LINEAR, AdapterSpec
from coati_rl.types import Device

NF4_BYTES = 0.5 + 4 / 64  # of a weight: 4 bits, and the largest of 64 as float32
_INTO_ATTENTION, _OUT_OF_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj"}), "o_proj"
_INTO_MLP, _OUT_OF_MLP = frozenset({"gate_proj", "up_proj"}), "down_proj"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterShape:
    """Hold the sizes of a model's adapters, or of one tensor-parallel rank's part of them."""

    rank: int
    names: frozenset[str]  # of the adapted layers, their last parts
    layer_weights: int  # parameters of the factors in one decoder layer
    layer_adapters: int  # adapted layers in one decoder layer
    largest_tensor: int  # parameters of the largest factor
    is_base_shared: bool = False  # the base is a map of the model's files, one for all trainers of a host
    quantized_layer_weights: int = 0  # of one decoder layer, in 4 bits
    largest_quantized: int = 0  # parameters of the largest layer in 4 bits, which is whole while it computes

    @property
    def keeps_attention_input(self) -> bool:
        """Whether an adapter keeps the normalized input of attention."""
        return not self.names.isdisjoint(_INTO_ATTENTION)

    @property
    def keeps_attention_output(self) -> bool:
        """Whether an adapter keeps what attention gives to its last layer."""
        return _OUT_OF_ATTENTION in self.names

    @property
    def keeps_mlp_input(self) -> bool:
        """Whether an adapter keeps the normalized input of the MLP."""
        return not self.names.isdisjoint(_INTO_MLP)

    @property
    def keeps_mlp_product(self) -> bool:
        """Whether an adapter keeps the product of both factors of the MLP."""
        return _OUT_OF_MLP in self.names

    def trained_weights(self, shape: ModelShape, layers: int) -> int:
        """Return what a rank trains of so many decoder layers: adapters, and a scalar head."""
        return layers * self.layer_weights + (shape.hidden if shape.vocabulary == 1 else 0)

    def base_bytes(self, weights: int, layers: int, item_bytes: int) -> int:
        """Return what a rank has of the base in memory of its own.

        Args:
            weights: parameters of the base on this rank.
            layers: decoder layers on it.
            item_bytes: of an element of the model's precision.
        """
        quantized = layers * self.quantized_layer_weights
        whole = 0 if self.is_base_shared else (weights - quantized) * item_bytes
        return whole + int(quantized * NF4_BYTES)

    def whole_weights(self, shape: ModelShape) -> int:
        """Return the parameters of a whole base that are not in 4 bits."""
        return shape.num_weights - shape.num_layers * self.quantized_layer_weights


def adapter_shape(
    hf_config: Any,
    spec: AdapterSpec,
    *,
    tensor_parallel_size: int = 1,
    is_base_shared: bool = False,
    is_quantized: bool = False,
) -> AdapterShape:
    """Return what one tensor-parallel rank holds of a model's adapters.

    Args:
        hf_config: transformers config of the model.
        spec: of the adapters.
        tensor_parallel_size: ranks that share each matrix; a factor is cut as the side of the weight that it has.
        is_base_shared: see `AdapterShape`.
        is_quantized: whether linear layers of the base have 4 bits.
    """
    linear = linear_layers(hf_config)
    adapted = [each for each in linear if spec.targets == (ALL_LINEAR,) or each.name in spec.targets]
    layers = max(1, hf_config.num_hidden_layers)
    sizes = [size for each in adapted for size in _factors(each, spec.rank, tensor_parallel_size)]
    quantized = [each.in_size * each.out_size for each in linear] if is_quantized else [0]
    return AdapterShape(
        rank=spec.rank,
        names=frozenset(each.name for each in adapted),
        layer_weights=-(-sum(sizes) // layers),
        layer_adapters=-(-len(adapted) // layers),
        largest_tensor=max(sizes, default=0),
        is_base_shared=is_base_shared,
        quantized_layer_weights=sum(quantized) // layers,
        largest_quantized=max(quantized),
    )


def shares_base(hf_config: Any, precision: str, device: Device, plugin: str) -> bool:
    """Whether the weights of a base that is not cut stay a map of its files, which all trainers of a host share.

    They do on a CPU, where the files have the precision's dtype; FSDP2 copies its rows.
    """
    dtype = str(getattr(hf_config, "dtype", None)).removeprefix("torch.")
    return device == "cpu" and plugin != "fsdp2" and dtype == {"fp32": "float32", "bf16": "bfloat16"}[precision]


def _factors(layer: LinearLayer, rank: int, tensor_parallel_size: int) -> tuple[int, int]:
    """Return the parameters of both factors, [rank, in] and [out, rank]."""
    in_parts = tensor_parallel_size if layer.style == "rowwise" else 1
    out_parts = tensor_parallel_size if layer.style == "colwise" else 1
    return rank * layer.in_size // in_parts, rank * layer.out_size // out_parts
