"""Try a job's model before anything starts: as the trainers compute its samples, and as they cut it over ranks."""

from pathlib import Path

from coati_rl.config.model import ROUTED
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.model_files.config import read_config
from consumer.adapters.check import check_adapters
from consumer.proofs.layout import check_layout_runs
from consumer.proofs.samples import packed_difference


def try_model(config: TrainingConfig, directory: Path, *, flag: str) -> float:
    """Return by how many nats samples that are packed into a row change each other; 0 if they do not.

    Args:
        config: of the job.
        directory: of the model.
        flag: that names the model; the trained one is --model.
    Raises: ConfigError if the job cannot compute its samples right, or not in its layout.
    """
    name, parallel = f"{flag} {directory}", config.parallel
    if flag == "--model":
        hf_config = read_config(directory, name)
        check_adapters(config, hf_config)
        if config.router_replay != "none" and hf_config.model_type not in ROUTED:
            raise ConfigError(
                f"--router-replay {config.router_replay}: {name} is a {hf_config.model_type}; routes are those "
                f"of {', '.join(sorted(ROUTED))}; leave it out"
            )
        if (coeff := config.setting("aux_loss_coeff", 0.0)) and hf_config.model_type not in ROUTED:
            raise ConfigError(
                f"--aux-loss-coeff {coeff:g}: {name} is a {hf_config.model_type}; its loss is that of "
                f"the routers of {', '.join(sorted(ROUTED))}; leave it out"
            )
    difference = packed_difference(
        directory,
        name=name,
        max_tokens=config.max_sample_tokens,
        has_scalar_head=flag == "--model" and isinstance(config, OfflineConfig) and config.HAS_SCALAR_HEAD,
    )
    check_layout_runs(
        directory,
        name=name,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        plugin=parallel.plugin,
    )
    return difference
