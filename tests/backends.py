"""Name the models of a backend by their directories."""

from pathlib import Path
from typing import Any

from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.protocols import Role
from consumer.backend_config import BackendConfig, ModelSource, frozen, trained
from consumer.models.scalar_head import ScalarHead


def backend_config(
    model_dir: Path,
    *,
    optimizer: OptimizerConfig | None = None,
    scalar_head: ScalarHead | None = None,
    reference_dir: Path | None = None,
    teacher_dir: Path | None = None,
    value_dir: Path | None = None,
    keeps_old_policy: bool = False,
    **settings: Any,
) -> BackendConfig:
    """Train the model of `model_dir`, and a critic if there is one; the others are frozen."""
    models: dict[Role, ModelSource] = {"policy": trained(model_dir, optimizer, head=scalar_head)}
    if value_dir is not None:
        models["value"] = trained(value_dir, optimizer, head=ScalarHead(seed=3, pad_token_id=0))
    if reference_dir is not None:
        models["reference"] = frozen(reference_dir)
    if teacher_dir is not None:
        models["teacher"] = frozen(teacher_dir)
    if keeps_old_policy:
        models["old"] = frozen(model_dir)
    return BackendConfig(models=models, **settings)
