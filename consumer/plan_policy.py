"""The ShardFormer policy of every decoder: what ColossalAI changes in a Hugging Face model.

ColossalAI's own policies rewrite forwards of transformers 4.51; this one replaces them for all architectures. It makes
the model's forward the policy's (`policy_forward`); sharding over tensors and stages will be added here.
"""

from transformers import PreTrainedModel

from coati_rl.errors import ConfigError
from consumer.colossal_compat import ModulePolicyDescription, Policy
from consumer.policy_model import policy_forward


class PlanPolicy(Policy):
    """One policy object serves one model."""

    def config_sanity_check(self) -> None:
        """Called by ColossalAI before anything else."""
        if self.shard_config.enable_tensor_parallelism or self.pipeline_stage_manager is not None:
            raise ConfigError("tensor and pipeline parallelism are not available in this version")

    def preprocess(self) -> PreTrainedModel:
        """The model before replacements."""
        return self.model

    def postprocess(self) -> PreTrainedModel:
        """The model after replacements."""
        return self.model

    def module_policy(self) -> dict[type, ModulePolicyDescription]:
        """What to replace, by class of module."""
        return {type(self.model): ModulePolicyDescription(method_replacement={"forward": policy_forward})}
