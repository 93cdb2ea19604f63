"""Try every causal language model class of the installed transformers as a job's model.

    python scripts/try_architectures.py [--layouts] [--only NAME,...] [--json FILE]

Each class gets a small random model of its own, in a directory, as `coati-rl sft` and RL would load it. It is proved as
before a job, then loaded as the trainers do, and its log-probabilities of other samples, laid out in rows as the proof
says, are compared with plain transformers' on each sample alone. With --layouts what has a tensor- or pipeline-parallel
plan is also cut over two processes. Prints a line for each and the counts; the exit code is 1 if any is silently
different.
"""

import argparse
import collections
import json
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as hf_logging

from coati_rl.errors import ConfigError
from coati_rl.model_files.quiet import no_progress_bars
from coati_rl.preflight.tiny_model import FIRST_TOKEN, tiny_model
from consumer.models.policy_model import load_policy, make_input, policy_forward
from consumer.parallel.layout_rules import check_pipeline_plan, tensor_parallel_plan
from consumer.proofs.layout import check_layout_runs
from consumer.proofs.samples import TOLERANCE, SamplePart, micro_batch_of, packed_difference, plain_values

MAX_TOKENS = 512
LENGTHS = (21, 5, 34, 12)  # tokens of the samples, other than the proof's

# Settings without which a class's default config cannot be built, or has no layer of the kind that its models have.
SETTINGS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"num_hidden_layers": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "falcon_h1": {"lm_head_multiplier": 1.0},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "zaya": {},
}


def rows_verdict(directory: Path) -> tuple[str, str]:
    """Return what the proof and then the trainers' own loading say: packed, rows, refused or DIFFERENT, and why."""
    try:
        difference = packed_difference(directory, name="--model m", max_tokens=MAX_TOKENS)
        model = load_policy(directory, dtype=torch.float32)
    except ConfigError as error:
        return "refused", " ".join(str(error).split())
    with no_progress_bars():
        plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    size = plain.config.get_text_config().vocab_size
    samples = [tuple(torch.randint(FIRST_TOKEN, size, (n,), generator=generator).tolist()) for n in LENGTHS]
    segments = [SamplePart(token_ids=sample) for sample in samples]
    rows = [[segment] for segment in segments] if difference else [segments[:2], segments[2:]]
    batch, counts = micro_batch_of(rows)
    with torch.no_grad():
        values, _ = policy_forward(model, make_input(batch, device=torch.device("cpu")))
        wanted = [plain_values(plain, sample) for sample in samples]
    got = [part for row, sizes in zip(values, counts, strict=True) for part in row[: sum(sizes)].split(sizes)]
    gap = max((a - b).abs().max().item() for a, b in zip(got, wanted, strict=True))
    if not gap <= TOLERANCE:
        return "DIFFERENT", f"{gap:.2g} nats"
    return ("rows", f"packed {difference:.2g} nats off") if difference else ("packed", f"{gap:.1g} nats")


def layout_verdict(directory: Path, config: Any, flag: str) -> tuple[str, str]:
    """Return plain gradients, refused or no plan."""
    try:
        if flag == "-tp":
            tensor_parallel_plan(config)
        else:
            check_pipeline_plan(config)
    except ConfigError as error:
        return "no plan", str(error)
    tp_size, pp_size = (2, 1) if flag == "-tp" else (1, 2)
    try:
        check_layout_runs(directory, name="--model m", tp_size=tp_size, pp_size=pp_size)
    except ConfigError as error:
        return "refused", str(error)
    return "equal", ""


def main() -> int:
    """Try them, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", action="store_true", help="also cut over two processes; takes minutes")
    parser.add_argument("--only", help="comma-separated architectures")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    hf_logging.set_verbosity_error()
    names = arguments.only.split(",") if arguments.only else sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            found[name] = _tried(name, Path(scratch), layouts=arguments.layouts)
        seconds = time.monotonic() - started
        said = "; ".join(
            f"{what} {verdict[0]}" + (f" ({verdict[1][:150]})" if verdict[1] else "")
            for what, verdict in found[name].items()
        )
        print(f"{name:<24}{seconds:6.1f} s  {said}", flush=True)
    counts = {
        what: collections.Counter(each[what][0] for each in found.values() if what in each)
        for what in ("samples", "-tp", "-pp")
    }
    print(json.dumps(counts, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return int("DIFFERENT" in counts["samples"])


def _tried(name: str, directory: Path, *, layouts: bool) -> dict[str, tuple[str, str]]:
    if name not in CONFIG_MAPPING:
        return {"samples": ("not built", "no config class")}
    try:
        config = AutoConfig.for_model(name, **SETTINGS.get(name, {}))
        model = tiny_model(config, AutoModelForCausalLM.from_config, num_kv_heads=2)
        with no_progress_bars():
            model.save_pretrained(directory)
    except Exception as error:  # noqa: BLE001  transformers' own classes fail in many ways
        return {"samples": ("not built", f"{type(error).__name__}: {' '.join(str(error).split())}")}
    found = {"samples": rows_verdict(directory)}
    if layouts and found["samples"][0] in ("packed", "rows"):
        found |= {flag: layout_verdict(directory, model.config, flag) for flag in ("-tp", "-pp")}
    return found


if __name__ == "__main__":
    sys.exit(main())
