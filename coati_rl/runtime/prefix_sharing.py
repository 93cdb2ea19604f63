"""Switch the sharing of prefixes off for models whose attention cannot do it."""

import json
from collections.abc import Mapping
from pathlib import Path

from coati_rl.config.model import PACKED_ATTENTION
from coati_rl.runtime.resources import Job


def with_prefix_sharing(config: Job, models: Mapping[str, str | None]) -> tuple[Job, list[str]]:
    """Return the config, without shared prefixes if a model's attention uses transformers' masks, and warnings.

    Args:
        config: of the job.
        models: that compute its micro-batches, by their flags; a directory, or a model that is not on this machine or
            not used, which is not checked.
    """
    if not config.shares_prefixes:
        return config, []
    for flag, model in models.items():
        if model is None or not Path(model).is_dir():
            continue
        architecture = json.loads((Path(model) / "config.json").read_text(encoding="utf-8")).get("model_type")
        if architecture not in PACKED_ATTENTION:
            warning = (
                f"--shared-prefix has no effect: {flag} {model} is a {architecture}, and samples share prefixes in "
                f"{', '.join(sorted(PACKED_ATTENTION))} only"
            )
            return config.with_changes(shared_prefix=False), [warning]
    return config, []
