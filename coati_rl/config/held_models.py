"""Say which frozen models a job has, which of them its trainers hold, and what of these is offloaded."""

from coati_rl.config.config import Config
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.training import TrainingConfig


def frozen_models(config: TrainingConfig) -> frozenset[str]:
    """Return the roles of the frozen models with weights of their own; with adapters these are few."""
    roles = {"reference": False, "old": False, "teacher": False}
    if isinstance(config, Config):
        roles["reference"] = not config.lora.is_on and config.algorithm.kl_coeff > 0
        roles["old"] = not config.lora.is_on and keeps_old_policy(config)
        roles["teacher"] = config.distillation.teacher is not None
    elif isinstance(config, OfflineConfig):
        shares_base = config.lora.is_on and config.reference_model == config.model.model
        roles["reference"] = config.uses_reference and not shares_base
        roles["teacher"] = config.teacher is not None
    return frozenset(role for role, is_there in roles.items() if is_there)


def remote_models(config: TrainingConfig) -> frozenset[str]:
    """Return the roles of frozen models that have devices of their own (--ref-devices)."""
    return frozen_models(config) & {"reference", "teacher"} if config.parallel.ref_devices else frozenset()


def keeps_old_policy(config: Config) -> bool:
    """Whether trainers may need the policy before the update; it is the step's own if each step has a sync after it."""
    corrected = config.with_gap_correction()
    return corrected.recomputes_old_logprobs and corrected.sync_period > corrected.algorithm.updates_per_batch


def offloaded(config: TrainingConfig) -> frozenset[str]:
    """Return the frozen roles, and "optimizer", whose memory trainers give up while they do not use it."""
    given = frozenset[str](config.parallel.offload)
    return (frozen_models(config) - remote_models(config)) | {"optimizer"} if "all" in given else given
