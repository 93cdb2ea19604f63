"""Define the ShardFormer policy of all decoders: the changes that ColossalAI makes to a Hugging Face model.

ColossalAI's own policies rewrite forwards of transformers 4.51. This one is derived from the plans that transformers
ships with each model: which linear layers are sharded by columns or rows over tensor-parallel ranks, and that a base
model consists of embedding, layers and norm. Plans with anything that is not supported here are refused by name.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from coati_rl.config.model import ROUTED
from consumer.models.loading import convert_shards
from consumer.models.policy_model import policy_forward
from consumer.models.scalar_head import scalar_head
from consumer.parallel.colossal_compat import (
    Linear1D_Col,
    Linear1D_Row,
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
    VocabParallelEmbedding1D,
    VocabParallelLMHead1D,
)
from consumer.parallel.experts import ExpertsOfRank
from consumer.parallel.layout_rules import EXPERTS, check_pipeline_plan, tensor_parallel_plan
from consumer.parallel.pipeline_stage import stage_forward, stages_of

LINEAR = {"colwise": Linear1D_Col, "rowwise": Linear1D_Row}
# `replicated_with_grad_allreduce` changes no module; the gradient reducer sums such parameters over tensor ranks.
NO_PADDING = {"make_vocab_size_divisible_by": 1}  # exported and saved weights keep their shape


class DecoderPolicy(Policy):
    """Define the module replacements and the pipeline stage of one model."""

    def config_sanity_check(self) -> None:
        """Check the model's plans; ColossalAI calls this first. Raises: ConfigError."""
        if self.shard_config.enable_tensor_parallelism:
            tensor_parallel_plan(self.model.config)
        if self.pipeline_stage_manager is not None:
            check_pipeline_plan(self.model.config)

    def preprocess(self) -> PreTrainedModel:
        """Return the model unchanged, before replacements."""
        return self.model

    def postprocess(self) -> PreTrainedModel:
        """Return the model unchanged, after replacements."""
        return self.model

    def module_policy(self) -> dict[type, ModulePolicyDescription]:
        """Return the replacements by module class."""
        model, base = self.model, self.model.base_model
        whole = ModulePolicyDescription(method_replacement={"forward": self._forward()})
        policy = {type(model): whole}
        if self.shard_config.enable_tensor_parallelism:
            plan, dtype = tensor_parallel_plan(model.config), model.config.dtype
            linear = [
                SubModuleReplacementDescription(
                    suffix=pattern.removeprefix("layers.*."),
                    target_module=ExpertsOfRank if style == EXPERTS else _converted(LINEAR[style], dtype),
                    ignore_if_not_exist=model.config.model_type in ROUTED,  # some layers may be dense, or all sparse
                )
                for pattern, style in plan.items()
                if style in LINEAR or style == EXPERTS
            ]
            policy |= {
                layer: ModulePolicyDescription(sub_module_replacement=linear)
                for layer in {type(layer) for layer in base.layers}
            }
            embedding = _vocabulary("embed_tokens", _converted(VocabParallelEmbedding1D, dtype))
            policy[type(base)] = ModulePolicyDescription(sub_module_replacement=[embedding])
            if scalar_head(model) is None:
                head = _converted(VocabParallelLMHead1D, dtype)
                whole.sub_module_replacement = [_vocabulary("lm_head", head)]
        return policy

    def get_held_layers(self) -> list[nn.Module]:
        """Return the modules of this pipeline stage."""
        manager, base = self.pipeline_stage_manager, self.model.base_model
        stage = stages_of(manager.distribute_layers(len(base.layers)))[manager.stage]
        held = [base.rotary_emb, *base.layers[stage.first : stage.last]]
        if stage.is_first:
            held.append(base.embed_tokens)
        if stage.is_last:
            held += [base.norm, scalar_head(self.model) or self.model.get_output_embeddings()]
        return held

    def get_shared_params(self) -> list[dict[int, Tensor]]:
        """Return none: the gradient reducer sums the gradients of tied embeddings once per step.

        ColossalAI would sum the accumulated gradient after every pipeline call and count earlier calls repeatedly.
        """
        return []

    def _forward(self) -> partial[Any]:
        group: dist.ProcessGroup | None = None
        if self.shard_config.enable_tensor_parallelism:
            group = self.shard_config.tensor_parallel_process_group
        manager = self.pipeline_stage_manager
        if manager is None:
            return partial(policy_forward, tp_group=group)
        stage = stages_of(manager.distribute_layers(len(self.model.base_model.layers)))[manager.stage]
        return partial(stage_forward, stage=stage, tp_group=group)


def _vocabulary(suffix: str, module: type) -> SubModuleReplacementDescription:
    return SubModuleReplacementDescription(suffix=suffix, target_module=module, kwargs=NO_PADDING)


def _converted(target: type, dtype: torch.dtype) -> type:
    """Return a class that makes modules of `target`, whose shards are copied once, into the dtype of training.

    A copy in the files' dtype would leave a gap in the heap when it is converted: the C library keeps it.
    """

    class Converted(target):
        @staticmethod
        def from_native_module(module: nn.Module, **options: Any) -> nn.Module:
            made: nn.Module = target.from_native_module(module, **options)  # type: ignore[attr-defined]
            convert_shards(made, dtype)
            return made

    return Converted
