"""Name the models of a backend by their directories."""

from pathlib import Path
from typing import Any

from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.protocols import Role
from consumer.adapters.adapters import AdapterSource
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
    adapters: AdapterSource | None = None,
    reference_adapters: AdapterSource | None = None,
    **settings: Any,
) -> BackendConfig:
    """Train the model of `model_dir`, and a critic if there is one; the others are frozen.

    With adapters these are trained, and reference and old policy are the same model with others, or none.
    """
    models: dict[Role, ModelSource] = {"policy": trained(model_dir, optimizer, head=scalar_head, adapters=adapters)}
    if adapters is not None and scalar_head is None:
        models["reference"] = ModelSource(directory=model_dir, shares="policy", adapters=reference_adapters)
        models["old"] = ModelSource(directory=model_dir, shares="policy")
    if value_dir is not None:
        head = ScalarHead(seed=3, pad_token_id=0)
        models["value"] = trained(value_dir, optimizer, head=head, adapters=adapters)
    if reference_dir is not None:
        models["reference"] = frozen(reference_dir)
    if teacher_dir is not None:
        models["teacher"] = frozen(teacher_dir)
    if keeps_old_policy:
        models["old"] = frozen(model_dir)
    return BackendConfig(models=models, **settings)
