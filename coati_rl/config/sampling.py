"""Set how responses are sampled."""

from typing import Literal

from pydantic import BaseModel

from coati_rl.config.fields import flag


class SamplingConfig(BaseModel):
    """Engine and sampling distribution."""

    backend: Literal["vllm", "transformers", "fake"] = flag(
        "vllm", "Generation engine; fake is deterministic noise for dry runs and tests.", short="-b"
    )
    num_generations: int = flag(8, "Samples per prompt: the group size.", short="-g", ge=1)
    temperature: float = flag(1.0, "Sampling temperature; the loss uses the same.", short="-temp", gt=0)
    top_k: int | None = flag(None, "Sample among the k likeliest tokens; default: all.", short="-topk", ge=1)
    top_p: float = flag(1.0, "Sample among the likeliest tokens that hold this mass.", short="-topp", gt=0, le=1)
    max_new_tokens: int = flag(3584, "Tokens per response at most.", short="-mnt", ge=1)
    max_episode_tokens: int | None = flag(
        None,
        "Tokens of an episode at most, prompt of -mpt and all turns after it; default: mpt + mnt.",
        ge=2,
    )
    stop: list[str] = flag([], "Text that ends a response; repeat the flag for several.")
