"""Merge an adapter into its base: `coati-rl merge [BASE] ADAPTER OUT [--precision fp32|bf16]`.

Exit code: 0 success, 1 it failed, 2 invalid arguments; OUT appears with 0 alone.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError, RunError
from coati_rl.processes.exit_codes import exit_code_of
from coati_rl.processes.run_dir import RunPaths

_PROG = "coati-rl merge"


def main(arguments: Sequence[str]) -> int:
    """Run `merge` and return its exit code."""
    parser = argparse.ArgumentParser(
        prog=_PROG,
        usage=f"{_PROG} [BASE] ADAPTER OUT [--precision fp32|bf16]",
        description="Write the Hugging Face model that an adapter makes of its base, after its outputs were compared.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="[BASE] ADAPTER OUT",
        help="the base's directory or hub id (default: the one that the adapter names); an adapter in PEFT's format, a "
        "checkpoint, or a run, whose newest one is taken; the directory to write",
    )
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), help="of the written weights; default: each has the base's"
    )
    parsed = parser.parse_args(arguments)
    if len(parsed.paths) not in (2, 3):
        parser.error("give [BASE] ADAPTER OUT")
    *base, adapter, out = parsed.paths

    def body() -> None:
        lines = merge(base[0] if base else None, adapter, Path(out).expanduser(), precision=parsed.precision)
        sys.stdout.write("".join(f"{_PROG}: {line}\n" for line in lines))

    return exit_code_of(body, prog=_PROG)


def export_run(config: TrainingConfig, paths: RunPaths) -> list[str]:
    """Write what --export asks for, from a run's last checkpoint. Returns: what to say of it. Raises: RunError."""
    if config.lora.export == "none":
        return []
    out = paths.run_dir / "export"
    shutil.rmtree(out, ignore_errors=True)  # of the run that this one goes on from
    try:
        return merge(config.model.model, str(paths.checkpoints), out)
    except ConfigError as error:
        what = f"--export {config.lora.export}: the checkpoints are whole, and the export failed"
        raise RunError(f"{what}: {error}") from error


def merge(base: str | None, adapter: str, out: Path, *, precision: str | None = None) -> list[str]:
    """Write a merged model. Returns: what to say of it.

    Args:
        base: directory or hub id; None: what the adapter names.
        adapter: directory of one, of a checkpoint, or of a run.
        out: directory to write.
        precision: fp32 or bf16; None: the base's.
    Raises: ConfigError, RunError; see `merge_adapter`.
    """
    import torch

    from coati_rl.checkpoint.weights import find_weights
    from coati_rl.model_files.adapter_files import is_adapter, read_adapter
    from coati_rl.model_files.identity import FINGERPRINT_DIGITS, model_identity
    from coati_rl.preflight.resources import resolve_model
    from consumer.adapters.merge import merge_adapter

    where = f"ADAPTER {adapter}"
    directory = find_weights(Path(adapter), where)
    if not is_adapter(directory):
        raise ConfigError(f"{where}: holds a whole model, so that there is nothing to merge; use it as it is")
    named = base or read_adapter(directory, where).base
    if not named:
        raise ConfigError(f"{where}: does not say what its base is; give it: {_PROG} BASE {adapter} {out}")
    found = resolve_model(named, is_dry_run=False, flag="BASE" if base else f"{where}: its base")
    if found is None:
        raise AssertionError("a model is None in a dry run only")
    dtype = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    merged = merge_adapter(found, directory, out.absolute(), dtype=dtype, where=where)
    proof, what = merged.proof, "values" if read_adapter(directory, where).has_scalar_head else "log-probabilities"
    return [
        f"{out}: {merged.num_tensors} tensors in {merged.num_files} file{'s' * (merged.num_files > 1)}, "
        f"{merged.num_layers} with an adapter; weights {model_identity(out)[:FINGERPRINT_DIGITS]}",
        f"{proof.num_values} {what}: at most {proof.largest:.2g} and on average {proof.mean:.2g} from the base with "
        f"the adapter, which is {proof.mean_of_base:.2g} from the base",
        *(["the adapter changes nothing: the layers' weights are the base's"] if proof.is_zero else []),
    ]
