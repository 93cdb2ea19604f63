"""Load the models of a trainer's backend by their roles, each with its memory where it is to lie."""

from collections.abc import Mapping

from coati_rl.protocols import Role
from consumer.adapter_view import AdapterView, views
from consumer.backend_config import BackendConfig, ModelSource
from consumer.models.loading import take_own_memory
from consumer.models.offloaded_activations import offload_layer_inputs
from consumer.parallel.parallelism import Parallelism
from consumer.role_models import RoleModel


def load_models(
    config: BackendConfig, parallelism: Parallelism
) -> tuple[dict[Role, RoleModel], Mapping[Role, AdapterView]]:
    """Load and shard the models; collective.

    Returns: models of their own, and the frozen ones that share the base of a trained one.
    Raises: ConfigError if one cannot be read or sharded; RunError if there is no room for what is offloaded.
    """
    models = {role: _load(role, each, config, parallelism) for role, each in config.models.items() if not each.shares}
    return models, views(models, config.models)


def _load(role: Role, source: ModelSource, config: BackendConfig, parallelism: Parallelism) -> RoleModel:
    device = parallelism.device
    model = RoleModel(
        role,
        source.directory,
        parallelism,
        precision=config.precision,
        optimizer=source.optimizer,
        gradient_checkpointing=config.gradient_checkpointing,
        compiles_ops=device.type == "cuda" if config.compile_ops is None else config.compile_ops,
        head=source.head,
        adapters=source.adapters,
        balancing_coeff={"policy": config.balancing_coeff, "old": 0.0}.get(role),
        router_replay=config.router_replay,
    )
    if source.optimizer is not None and config.offload_activations:
        offload_layer_inputs(model.module)
    if role == "old" or source.is_saved:
        take_own_memory(model.module)
    if ("optimizer" if source.optimizer is not None else role) in config.offload:
        model.memory.offload(device, config.offload_dir)
    return model
