"""Define the JSON bodies of Tinker's API; fields that a newer client adds are left unread."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, max_length=256)]
Sequential = Annotated[int, Field(ge=0, lt=2**62)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seconds = Annotated[int, Field(ge=1, le=10 * 366 * 86400)]
Metadata = dict[str, Any] | None
Token = Annotated[int, Field(ge=0, lt=2**31)]
MAX_TEXT = 2**16


class Body(BaseModel):
    """A body: numbers are finite, and no text stands for a number."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=(), frozen=True)


class CreateSession(Body):
    """Begin a session."""

    sdk_version: str = Field("", max_length=256)
    user_metadata: Metadata = None
    display_name: str | None = Field(None, max_length=1000)


class SessionBody(Body):
    """Name a session."""

    session_id: Name


class LoraConfig(Body):
    """The adapters of a model; rank 0, an extension, trains all weights."""

    rank: int = Field(ge=0, le=4096)
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    """The kind of optimizer."""

    type: str = "adamw"


class CreateModel(Body):
    """Create a model."""

    session_id: Name
    model_seq_id: Sequential
    base_model: Name
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: Metadata = None


class ModelBody(Body):
    """Name a model."""

    model_id: Name


class Ordered(ModelBody):
    """Name a model and the place of this request among its own."""

    seq_id: Sequential


class AdamParams(Body):
    """The numbers of an AdamW step."""

    learning_rate: float = Field(1e-4, ge=0, le=1e6)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0, le=1e6)
    weight_decay: float = Field(0.0, ge=0, le=1e6)
    grad_clip_norm: float = Field(0.0, ge=0, le=1e30)


class OptimStep(Ordered):
    """Take a step."""

    adam_params: AdamParams | None = None


class Save(Ordered):
    """Save a checkpoint, for training or for a sampler."""

    path: str | None = Field(None, max_length=256)
    overwrite: bool = False
    ttl_seconds: Seconds | None = None
    user_metadata: Metadata = None


class SaveForSampler(Save):
    """Save for a sampler: by a name, or as a sampler's weights."""

    sampling_session_seq_id: Sequential | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class Load(Body):
    """Load a checkpoint into a model, or create a model of one."""

    path: str = Field(max_length=1024)
    optimizer: bool
    model_id: Name | None = None
    seq_id: Sequential | None = None
    session_id: Name | None = None
    model_seq_id: Sequential | None = None
    base_model: Name | None = None
    user_metadata: Metadata = None


class CreateSampler(Body):
    """Create a sampler of a base model, or of a checkpoint."""

    session_id: Name
    sampling_session_seq_id: Sequential
    base_model: Name | None = None
    model_path: str | None = Field(None, max_length=1024)


class SamplerBody(Body):
    """Name a sampler."""

    sampling_session_id: Name


class Chunk(Body):
    """A piece of a prompt; an image or audio has no tokens, and is refused."""

    tokens: list[Token]


class Prompt(Body):
    """A prompt."""

    chunks: list[Chunk]


class SamplingParams(Body):
    """How tokens are drawn."""

    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    seed: Seed | None = None
    stop: str | list[str] | list[Token] | None = None
    temperature: float = Field(1.0, ge=0, le=1e6)
    top_k: int = Field(-1, ge=-1, lt=2**31)
    top_p: float = Field(1.0, gt=0, le=1)


class Sample(SamplerBody):
    """Sample from a prompt."""

    seq_id: Sequential
    num_samples: int = Field(1, ge=1, le=4096)
    prompt: Prompt
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=1024)
    topk_sample_logprobs: int = Field(0, ge=0)
    prompt_alt_tokens_k: int = Field(0, ge=0)
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    target_prompt_logprobs: Any = None


class FutureBody(Body):
    """Name a future."""

    request_id: Name
    allow_metadata_only: bool = False


class PathBody(Body):
    """Name a checkpoint."""

    tinker_path: str = Field(max_length=1024)


class Ttl(Body):
    """Set when a checkpoint expires; None: never."""

    ttl_seconds: Seconds | None = None
