"""Write the table of plans in docs/gpu.md: what a run of each model on so many GPUs of 80 GiB is planned as.

    python scripts/make_gpu_plans.py [--check]

Each row is a plan as --dry-run makes it, by the same choice and the same forecast, from the shape of a model alone.
Half of the GPUs are trainers, or three quarters where half do not hold the model; the others are engines, of as many
ranks as leave the cache room for half of the samples in flight at their longest. A run needs two GPUs; on one a model
can be fine-tuned (coati-rl sft). The last table is of fine-tunings on rows of 131,072 tokens.

With --check nothing is written; the exit status is 1 if the page differs from the planner.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from coati_rl.config import Config
from coati_rl.config.fields import given_flags
from coati_rl.config.gpu_rules import with_device_defaults
from coati_rl.config.jobs.sft import SftJobConfig
from coati_rl.config.parallel import ParallelConfig
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError
from coati_rl.memory.forecast import GIB, Forecast
from coati_rl.memory.layouts import PLAIN, layout_flags
from coati_rl.memory.nearest import Change
from coati_rl.memory.run_memory import Machine
from coati_rl.memory.trainer import Parts
from coati_rl.preflight.job_memory import job_check, run_check
from coati_rl.preflight.layout_choice import with_choices
from coati_rl.preflight.memory_check import MemoryCheck
from consumer.parallel.layout_rules import check_layout

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gpu.md"
BEGIN = "<!-- What follows is written by scripts/make_gpu_plans.py from the planner. -->\n"
END = "<!-- End of the plans. -->\n"
GPU_BYTES = 80 * GIB
MACHINE = Machine(device="cuda", host_bytes=2**40, gpu_bytes=GPU_BYTES)
NO_CHANGE = Change(flags="", values={})
NUM_GPUS = (1, 8, 16, 64)
NUM_LONG_ROW_GPUS, LONG_ROW = 8, 2**17
LONG_ROW_MODELS = ("Qwen3-0.6B", "Qwen2.5-7B", "Qwen2.5-32B")
SHOWN = ("--plugin", "--context", "--gradient", "--offload")
COLUMNS = {  # of a trainer: parts of the forecast, of which FSDP2's parameters are masters
    "weights": ("parameters", "gathered"),
    "masters": ("masters",),
    "reference": ("frozen models",),
    "gradients": ("gradients", "communication"),
    "optimizer": ("optimizer",),
    "activations": ("activations", "backward", "LM head"),
    "staging": ("sent weights",),
}
ENGINE_COLUMNS = {"weights": ("parameters",), "KV cache": ("KV cache",), "staging": ("staging",)}
LENGTHS = {"max_prompt_tokens": 1024, "max_new_tokens": 4096, "num_generations": 8}
_QWEN2 = {"model_type": "qwen2", "tie_word_embeddings": False, "vocab_size": 152064, "max_position_embeddings": 32768}
_OF_32B = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
_OF_72B = {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        **{"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
        **{"tie_word_embeddings": True, "max_position_embeddings": 40960},
    },
    "Qwen2.5-7B": {
        **_QWEN2,
        **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
        "num_key_value_heads": 4,
    },
    "Qwen2.5-32B": {**_QWEN2, **_OF_32B, "num_key_value_heads": 8},
    "Qwen2.5-72B": {**_QWEN2, **_OF_72B, "num_key_value_heads": 8},
    "Llama-70B": {
        **{"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
        "max_position_embeddings": 8192,
    },
}
# As a user may give them: 64 GPUs, half of them trainers.
LLAMA_FLAGS = {"num_trainers": 32, "plugin": "fsdp2", "num_inferencer": 8, "producer_tensor_parallel_size": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPlan:
    """Hold the plan of a run, or of a fine-tuning on one GPU."""

    config: Config | SftJobConfig
    forecast: Forecast

    @classmethod
    def of(cls, checked: MemoryCheck[Any]) -> "GpuPlan":
        """Return the plan of a checked job."""
        return cls(config=checked.config, forecast=checked.forecast(checked.config))

    def cells(self) -> list[str]:
        """Return the plan's cells in a row of the first table."""
        parallel, processes = self.config.parallel, self.forecast.processes
        layout = f"`{layout_flags(parallel.model_dump(), PLAIN) or '-zero 0'}`"
        tokens = str(parallel.max_tokens_per_microbatch)
        sizes = [size for each in processes for size in (_total(each.parts), _total(each.on_one_host("cuda")))]
        if not isinstance(parallel, ParallelConfig):
            return [f"`-t {parallel.num_trainers}`, fine-tuning", layout, tokens, *sizes, "", "", ""]
        width = f" -ptp {parallel.producer_tensor_parallel_size}" if parallel.producer_tensor_parallel_size > 1 else ""
        split = f"`-t {parallel.num_trainers} -i {parallel.num_inferencer}{width}`"
        return [split, layout, tokens, *sizes[:2], f"{parallel.gpu_memory_utilization:g}", *sizes[2:4]]

    def part_cells(self) -> list[str]:
        """Return the plan's cells in a row of the second table."""
        columns = COLUMNS
        if self.config.parallel.plugin == "fsdp2":
            columns = {**COLUMNS, "weights": ("gathered",), "masters": ("parameters",)}
        trainer, *engines = self.forecast.processes
        of_engine = _sizes(engines[0].parts, ENGINE_COLUMNS) if engines else [""] * len(ENGINE_COLUMNS)
        return [*_sizes(trainer.parts, columns), *of_engine]


def plan_of(model: str, num_gpus: int) -> GpuPlan | str:
    """Return the plan of a model on so many GPUs; why there is none."""
    hf_config = hf_config_of(model)
    if num_gpus == 1:
        return _fine_tuning(hf_config)
    if model.startswith("Llama"):
        return GpuPlan.of(_run(hf_config, LLAMA_FLAGS))
    first: MemoryCheck[Any] | None = None
    plans = list[GpuPlan]()
    for trainers in (num_gpus // 2, num_gpus * 3 // 4):
        for width in (1, 2, 4, 8):
            engines, rest = divmod(num_gpus - trainers, width)
            if engines == 0 or rest:
                continue
            sizes = {"num_trainers": trainers, "num_inferencer": engines, "producer_tensor_parallel_size": width}
            checked = _run(hf_config, sizes)
            first = first or checked
            if not checked.fits(None):
                if checked.trainer_bytes(NO_CHANGE) > GPU_BYTES:
                    break
                continue
            plans.append(GpuPlan.of(checked))
            if _has_room_for_half(plans[-1], hf_config):
                return plans[-1]
    assert first is not None  # noqa: S101, half of the GPUs as engines of one rank are always there
    return plans[-1] if plans else _refusal(first)


def _run(hf_config: Any, sizes: Mapping[str, Any]) -> MemoryCheck[Config]:
    """Choose what a run leaves open: each step has as many prompts as all engines sample in a rollout step."""
    trainers, engines = sizes["num_trainers"], sizes["num_inferencer"]
    steps = {"train_batch_size": 8 * engines, "inference_batch_size": 8 * trainers}
    config = Config(**sizes, **steps, **LENGTHS, master_address="10.0.0.1")
    given = config.parallel.model_fields_set
    check(config)
    memory_check = check_of_run(hf_config)
    config, _ = with_choices(
        with_device_defaults(config, "cuda"),
        hf_config,
        "cuda",
        given=given,
        memory_check=memory_check,
        gpu_memory=GPU_BYTES,
    )
    return memory_check(config, MACHINE)


def check_of_run(hf_config: Any) -> Callable[[Config, Machine], MemoryCheck[Config]]:
    """Return the check of a run's memory, whose prompts are unknown."""
    return lambda config, machine: run_check(config, hf_config, machine, prompt_tokens=None, check_layout=check_layout)


def check_of_job(hf_config: Any) -> Callable[[SftJobConfig, Machine], MemoryCheck[SftJobConfig]]:
    """Return the check of a job's memory, whose samples are unknown."""
    return lambda config, machine: job_check(config, hf_config, machine, samples=(), check_layout=check_layout)


def _fine_tuning(hf_config: Any) -> GpuPlan | str:
    memory_check = check_of_job(hf_config)
    config, _ = with_choices(
        with_device_defaults(SftJobConfig(master_address="10.0.0.1"), "cuda"),
        hf_config,
        "cuda",
        given=(),
        memory_check=memory_check,
        gpu_memory=GPU_BYTES,
    )
    checked = memory_check(config, MACHINE)
    return GpuPlan.of(checked) if checked.fits(None) else _refusal(checked)


def _refusal(checked: MemoryCheck[Any]) -> str:
    """Return why a plan that does not fit is refused, or what is warned of."""
    try:
        return checked.run()[1][0]
    except ConfigError as error:
        return str(error)


def _has_room_for_half(plan: GpuPlan, hf_config: Any) -> bool:
    """Whether an engine's cache holds half of the samples in flight at their longest."""
    assert isinstance(plan.config, Config)  # noqa: S101, runs have engines
    width = plan.config.parallel.producer_tensor_parallel_size
    heads = max(1, hf_config.num_key_value_heads // width)
    token = 2 * 2 * hf_config.num_hidden_layers * heads * _head_dim(hf_config)
    wanted = token * plan.config.max_model_len * plan.config.sequences_in_flight
    return 2 * plan.forecast.processes[1].parts["KV cache"] >= wanted


def _head_dim(hf_config: Any) -> int:
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


def hf_config_of(model: str) -> Any:
    """Return the transformers config of one of MODELS."""
    from transformers import AutoConfig

    values = dict(MODELS[model])
    return AutoConfig.for_model(values.pop("model_type"), **values)


def _sizes(parts: Parts, columns: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [_total({name: parts.get(name, 0) for name in names}) for names in columns.values()]


def _total(parts: Parts) -> str:
    return f"{sum(parts.values()) / GIB:.1f}"


def table_lines() -> Iterator[str]:
    """Yield the lines of both tables."""
    gpus = {model: (64,) if model.startswith("Llama") else NUM_GPUS for model in MODELS}
    plans = {(model, count): plan_of(model, count) for model in MODELS for count in gpus[model]}
    head = ["model", "GPUs", "split", "layout", "tokens", "trainer", "its host", "share"]
    head += ["engine rank", "engine's host"]
    yield from _heading(head)
    for (model, count), plan in plans.items():
        cells = [f"refused: {_needs(plan)}", *[""] * (len(head) - 3)] if isinstance(plan, str) else plan.cells()
        yield _row([model, str(count), *cells])
    yield ""
    yield from _heading(["model", "GPUs", *COLUMNS, *(f"engine: {each}" for each in ENGINE_COLUMNS)])
    for (model, count), plan in plans.items():
        if not isinstance(plan, str):
            yield _row([model, str(count), *plan.part_cells()])


def long_row_lines() -> Iterator[str]:
    """Yield the lines of the table of long rows: a fine-tuning on 8 GPUs, whose rows are cut over none, or all."""
    yield from _heading(["model", "layout", "trainer", "its host", "activations"])
    for model, cp, offloads in product(LONG_ROW_MODELS, (1, NUM_LONG_ROW_GPUS), (False, True)):
        lengths = {"max_length": LONG_ROW, "max_tokens_per_microbatch": LONG_ROW}
        layout = {"plugin": "fsdp2", "context_parallel_size": cp, "num_trainers": NUM_LONG_ROW_GPUS}
        memory = {"gradient_checkpointing": not offloads, "offload_activations": offloads}
        config = SftJobConfig(**lengths, **layout, **memory, master_address="10.0.0.1")
        checked = check_of_job(hf_config_of(model))(config, MACHINE)
        (trainer,) = checked.forecast(config).processes
        sizes = [_total(trainer.parts), _total(trainer.on_one_host("cuda"))]
        sizes += _sizes(trainer.parts, {"activations": COLUMNS["activations"]})
        sizes[0] += "" if checked.fits(None) else ", refused"
        flags = " ".join(each for each in given_flags(config.parallel).values() if each.startswith(SHOWN))
        yield _row([model, f"`{flags}`", *sizes])


def _heading(columns: list[str]) -> list[str]:
    return [_row(columns), _row(["---"] * len(columns))]


def _needs(refusal: str) -> str:
    """Return what is missing, of a refusal: the need, and how many trainers would do."""
    need = refusal.partition(": ")[2].partition(" (")[0]
    return f"{need}{'; ' + found[1] if (found := re.search(r'(-t [0-9]+ --plugin fsdp2.* holds it)', refusal)) else ''}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """Return docs/gpu.md with the table as the planner has it."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join([*table_lines(), "", *long_row_lines()])
    return f"{before}{BEGIN}\n{table}\n\n{END}{after}"


def main() -> int:
    """Write or check the page; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    check_only = parser.parse_args().check
    text = page()
    if check_only:
        return int(text != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
