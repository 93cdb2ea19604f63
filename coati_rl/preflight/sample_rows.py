"""Lay samples out in rows as the job's models can compute them: packed with shared prefixes, packed, or a row each."""

from collections.abc import Callable, Mapping
from pathlib import Path

from coati_rl.config.model import PACKED_ATTENTION
from coati_rl.preflight.resources import Job, read_model_config

TryModel = Callable[..., float]  # of `consumer.proofs.model`


def with_sample_rows(config: Job, models: Mapping[str, str | None], *, try_model: TryModel) -> tuple[Job, list[str]]:
    """Return the config with rows that all models compute right, and warnings.

    Args:
        config: of the job.
        models: that compute its micro-batches, by their flags; a directory, or a model that is not on this machine or
            not used, which is not tried.
        try_model: returns by how many nats packed samples change each other.
    Raises: ConfigError for a model whose samples cannot be computed right even in rows of their own.
    """
    here = {flag: Path(model) for flag, model in models.items() if model is not None and Path(model).is_dir()}
    warnings = list[str]()
    for flag, directory in here.items():
        difference = try_model(config, directory, flag=flag)
        if difference > 0 and not config.parallel.one_sample_per_row:
            config = config.with_changes(one_sample_per_row=True)
            warnings.append(
                f"--one-sample-per-row is set: the layers of {flag} {directory} see other samples of a packed row "
                f"(log-probabilities change by up to {difference:.2g} nats)"
            )
    if not config.shares_prefixes:
        return config, warnings
    for flag, directory in here.items():
        architecture = read_model_config(directory, flag).model_type
        if architecture not in PACKED_ATTENTION:
            warnings.append(
                f"--shared-prefix has no effect: {flag} {directory} is a {architecture}, and samples share prefixes in "
                f"{', '.join(sorted(PACKED_ATTENTION))} only"
            )
            return config.with_changes(shared_prefix=False), warnings
    return config, warnings
