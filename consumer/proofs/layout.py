"""Try whether an architecture can be cut over tensor-parallel ranks and pipeline stages, before anything starts.

transformers' plans say which layers to shard, but not which of an architecture's other parameters get a part of their
gradient on each rank, or which modules fail on a shard. Two processes (`layout_trial`) compute log-probabilities and
gradients of a `tiny_model`, and compare their parts with plain transformers'. Architectures whose gradients the tests
compare are not tried again.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from coati_rl.config.trainers import PluginName
from coati_rl.errors import ConfigError
from coati_rl.model_files.config import read_config
from consumer.parallel.layout_rules import TESTED

_TIMEOUT_S = 300.0  # also on a machine that is busy with other work
_RANKS = 2  # what holds on two ranks holds on more: the code is the same


def check_layout_runs(directory: Path, *, name: str, tp_size: int, pp_size: int, plugin: PluginName = "hybrid") -> None:
    """Run the architecture cut as asked, unless it is tested.

    Args:
        directory: of the model.
        name: the model by its flag, for messages.
        tp_size: tensor-parallel ranks.
        pp_size: pipeline stages.
        plugin: that cuts the model.
    Raises: ConfigError if it cannot run, or its log-probabilities or gradients differ.
    """
    config = read_config(directory, name)
    asked = {"-tp": tp_size, "-pp": pp_size}
    if config.model_type in TESTED or max(asked.values()) == 1:
        return
    with tempfile.TemporaryDirectory(prefix="coati-layout-") as scratch:
        model = Path(scratch) / "model"
        _save_tiny(config, model, name)
        for flag, size in asked.items():
            if size > 1 and (problem := _problem(model, Path(scratch), flag, plugin)):
                raise ConfigError(
                    f"{flag} {size}: {name} is a {config.model_type}, and {problem}; use {flag} 1 or one of "
                    f"{', '.join(TESTED)}"
                )


def _save_tiny(config: Any, directory: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    from coati_rl.model_files.quiet import no_progress_bars
    from coati_rl.preflight.tiny_model import tiny_model

    try:
        model = tiny_model(config, AutoModelForCausalLM.from_config, num_kv_heads=_RANKS)
    except ValueError as error:
        raise ConfigError(
            f"{name} ({config.model_type}): transformers cannot run this architecture ({error})"
        ) from error
    with no_progress_bars():
        model.save_pretrained(directory)


def _problem(model: Path, scratch: Path, flag: str, plugin: PluginName) -> str | None:
    """Return what is wrong with a model in two processes, cut by tensor or pipeline parallelism; None: nothing."""
    store = scratch / f"store{flag}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "consumer.proofs.layout_trial",
        str(model),
        str(store),
        flag,
        plugin,
    ]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        for rank in range(_RANKS)
    ]
    try:
        outputs = [rank.communicate(timeout=_TIMEOUT_S)[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        return f"does not finish a step within {_TIMEOUT_S:g} s when it is cut"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = [json.loads(output.splitlines()[-1]) for output in outputs if output.strip()]
    errors = [each["error"] for each in found if "error" in each]
    if errors or len(found) < _RANKS:
        return f"cannot be cut ({errors[0] if errors else 'a process ended'})"
    worst = max(found, key=lambda each: each["difference"])
    return None if worst["difference"] <= 1 else worst["text"]
