"""Set how responses are sampled."""

from typing import Annotated, Any

from pydantic import AfterValidator

from coati_rl.config.engine_urls import Backend
from coati_rl.config.fields import Section, execution, experiment
from coati_rl.config.named_values import NamedValues

UNCUT = {"--top-k": None, "--top-p": 1, "--min-p": 0}  # the values with which no token is left out
_MIN_TEMPERATURE = 0.01  # vLLM takes this for any that is lower, but for 0
_MAX_TEMPERATURE = 2.0  # vLLM refuses any that is higher


def temperature_problem(temperature: float) -> str | None:
    """Return why a temperature would not be the one that is sampled at; None if it is."""
    if 0 < temperature < _MIN_TEMPERATURE:
        return f"is below {_MIN_TEMPERATURE:g}, the lowest that vLLM samples at; use {_MIN_TEMPERATURE:g} or more"
    if temperature > _MAX_TEMPERATURE:
        return f"is above {_MAX_TEMPERATURE:g}, the highest that vLLM samples at; use {_MAX_TEMPERATURE:g} or less"
    return None


def _check_temperature(temperature: float) -> float:
    if problem := temperature_problem(temperature):
        raise ValueError(problem)
    return temperature


def _check_stop(stop: list[str]) -> list[str]:
    if "" in stop:
        raise ValueError("an empty text ends every response at its first token; leave it out")
    return stop


Temperature = Annotated[float, AfterValidator(_check_temperature)]
StopTexts = Annotated[list[str], AfterValidator(_check_stop)]


def own_engine() -> Any:
    """Return the field of a command whose engine is in a process of its own."""
    return experiment("vllm", "Generation engine; fake is deterministic noise for dry runs and tests.", short="-b")


class SamplingConfig(Section):
    """Engine and sampling distribution."""

    backend: Backend = experiment(
        "vllm",
        "Generation engine; fake is deterministic noise for dry runs and tests. Or the address of a vLLM or SGLang "
        "server that runs already, of several with commas: http://HOST:8000,http://HOST:8001, one for each of -i.",
        short="-b",
        metavar="{vllm,transformers,fake,URL}",
    )
    num_generations: int = experiment(8, "Samples per prompt: the group size.", short="-g", ge=1)
    temperature: Temperature = experiment(1.0, "Sampling temperature; the loss uses the same.", short="-temp", gt=0)
    top_k: int | None = experiment(None, "Sample among the k likeliest tokens; default: all.", short="-topk", ge=1)
    top_p: float = experiment(1.0, "Sample among the likeliest tokens that hold this mass.", short="-topp", gt=0, le=1)
    min_p: float = experiment(
        0.0, "Sample among the tokens of at least this share of the likeliest one's probability; 0: all.", ge=0, le=1
    )
    max_new_tokens: int = experiment(3584, "Tokens per response at most.", short="-mnt", ge=1)
    max_episode_tokens: int | None = experiment(
        None, "Tokens of an episode at most, prompt of -mpt and all turns after it; default: mpt + mnt.", ge=2
    )
    max_num_seqs: int | None = execution(
        None, "Samples that an engine decodes at a time; the others of -imbs prompts wait. Default: all of them.", ge=1
    )
    block_size: int | None = execution(
        None,
        "Tokens of a block of vLLM's key-value cache. The samples of a prompt, and the turns of an episode, share "
        "whole blocks, and each computes the rest. Default: 32 on the CPU, vLLM's own on GPUs.",
        ge=16,
        multiple_of=16,
        needs={"backend": ("vllm",)},
    )
    quantization: str | None = experiment(
        None,
        "Method by which vLLM quantizes the engines' weights at each weight sync, such as fp8; trainers keep theirs. "
        "Default: none.",
        needs={"backend": ("vllm",)},
    )
    enforce_eager: bool | None = execution(
        None,
        "Run vLLM's model without torch.compile and CUDA graphs: it is ready sooner and takes less memory, and is "
        "slower. Default: on on the CPU, off on GPUs.",
        needs={"backend": ("vllm",)},
    )
    engine_arg: NamedValues = execution(
        [],
        "NAME=VALUE for vLLM's EngineArgs, a JSON value or text, such as kv_cache_dtype=fp8; repeat the flag for "
        "several. What has a flag of its own is refused.",
        metavar="NAME=VALUE",
        needs={"backend": ("vllm",)},
    )
    stop: StopTexts = experiment([], "Text that ends a response; repeat the flag for several.")
    eval_samples: int = execution(
        1,
        "Answers per evaluation prompt; several give avg@N and pass@k.",
        ge=1,
        needs={"eval_temperature": ()},
    )
    eval_temperature: Temperature = execution(0.0, "Sampling temperature of evaluations; 0 is greedy.", ge=0)
    eval_top_p: float = execution(1.0, "As --top-p, of evaluations.", gt=0, le=1, needs={"eval_temperature": ()})

    @property
    def cuts(self) -> dict[str, float]:
        """Return the flags of training that leave tokens out, with their values; engines renormalise over the rest."""
        given = {"--top-k": self.top_k, "--top-p": self.top_p, "--min-p": self.min_p}
        return {flag: value for flag, value in given.items() if value is not None and value != UNCUT[flag]}

    @property
    def largest_group(self) -> int:
        """Return the samples of a prompt that are scored together, in training or in an evaluation."""
        return max(self.num_generations, self.eval_samples)
