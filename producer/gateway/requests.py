"""Read the requests of OpenAI's API: what is answered, what is ignored, and what is refused by its name.

In: the JSON of a body. Out: a `ChatRequest` or a `CompletionRequest`, whose messages have one form whatever client
wrote them, so that they are found again when it sends them back.
"""

import json
from abc import abstractmethod
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, ValidationError, model_validator

from producer.gateway.api_error import ApiError
from producer.gateway.messages import normalised_messages

MAX_SAMPLES = 128  # n of one request
_MAX_STOPS = 16
_MAX_TOOLS = 256

# Fields that change nothing here.
_IGNORED = frozenset(
    {"metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
    | {"service_tier", "store", "user"}
)
# Values that ask for nothing beyond what is done; other values of these fields, and all other fields, are refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "suffix": ("",),
    "top_logprobs": (0,),
}
CONSTRAINED = "constrained decoding, which would renormalise the probabilities of what is sampled"
_REASONS = {
    "structured_outputs": "use response_format",
    "tool_choice": f"a forced call needs {CONSTRAINED}",
    "prompt": "give one text, or one list of token ids",
    "top_logprobs": "only the sampled token's log-probability is known; leave it out",
    "functions": "use tools",
    "function_call": "use tools",
}

Request = TypeVar("Request", bound="SampledRequest")


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _no_truth_value(value: Any) -> Any:
    """Return the value. Raises: ValueError for true and false, which pydantic takes as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("a truth value is no number")
    return value


WholeNumber = Annotated[int, BeforeValidator(_no_truth_value)]
Number = Annotated[float, BeforeValidator(_no_truth_value)]


def _only_one(value: Any) -> Any:
    """Return the only prompt of a list of prompts; anything else as it is."""
    is_one = isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list)
    return value[0] if is_one else value


class StreamOptions(BaseModel):
    """Choose what a stream ends with."""

    include_usage: bool = False
    include_obfuscation: bool = False  # nothing is added here


class JsonSchema(BaseModel):
    """Hold the schema of a response format; its name, description and `strict` change nothing: it always holds."""

    json_object: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """Choose what form an answer has: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('needs {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}')
        return self

    @property
    def schema_text(self) -> str | None:
        """Return the JSON text of the schema that an answer follows; None: it is any text."""
        if self.type == "text":
            return None
        return json.dumps(self.json_schema.json_object if self.json_schema else {"type": "object"})


class SampledRequest(BaseModel):
    """Hold the fields that chat completions and completions share; a null is a field left out."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False, protected_namespaces=())

    model: str = ""  # any name: there is one model
    n: WholeNumber = Field(1, ge=1, le=MAX_SAMPLES)
    temperature: Number | None = Field(None, ge=0, le=100)
    top_p: Number | None = Field(None, gt=0, le=1)
    top_k: WholeNumber | None = Field(None, ge=-1)  # of vLLM's API; -1 and 0: all tokens
    min_p: Number | None = Field(None, ge=0, le=1)  # of vLLM's API
    seed: WholeNumber | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_one_or_more)] = Field(
        [], max_length=_MAX_STOPS
    )
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: WholeNumber | None = Field(None, ge=1)
    response_format: ResponseFormat = ResponseFormat(type="text")

    @property
    def token_limit(self) -> int | None:
        """Return the most tokens that an answer may have; None: as many as the server allows."""
        return self.max_tokens

    @property
    @abstractmethod
    def with_logprobs(self) -> bool:
        """Return True if the log-probability of each sampled token is wanted."""


class ChatRequest(SampledRequest):
    """Hold a request for chat completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] = Field([], max_length=_MAX_TOOLS)
    tool_choice: Literal["auto", "none"] = "auto"
    logprobs: bool = False
    max_completion_tokens: WholeNumber | None = Field(None, ge=1)
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None

    @property
    def token_limit(self) -> int | None:
        """See `SampledRequest`; max_tokens is the older name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def with_logprobs(self) -> bool:
        return self.logprobs

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the template renders; None: there are none."""
        return self.tools if self.tools and self.tool_choice == "auto" else None


class CompletionRequest(SampledRequest):
    """Hold a request for completions of raw text or tokens."""

    prompt: Annotated[str | list[StrictInt], BeforeValidator(_only_one)] = Field(min_length=1)
    logprobs: WholeNumber | None = Field(None, ge=0, le=0)  # 0: of the sampled token alone

    @property
    def with_logprobs(self) -> bool:
        return self.logprobs is not None


def read_request(body: bytes, kind: type[Request]) -> Request:
    """Return the request of a body. Raises: ApiError(400) that names the first field at fault."""
    try:
        values = json.loads(body)
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ApiError(400, "the body holds half of a surrogate pair, which is no text") from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ApiError(400, "the body is not a JSON object")
    given = {name: value for name, value in values.items() if value is not None}
    _refuse_unknown(given, kind)
    try:
        if kind is ChatRequest:
            given |= {"messages": normalised_messages(given.get("messages"))}
            _check_tools(given.get("tools", []))
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        reason = f"; {_REASONS[name]}" if name in _REASONS else ""
        place = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"{place}: {first['msg']}{reason}", param=name, code="invalid_value") from error


def _refuse_unknown(given: dict[str, Any], kind: type[SampledRequest]) -> None:
    for name, value in given.items():
        if name in kind.model_fields or name in _IGNORED:
            continue
        if not any(value == neutral for neutral in _NEUTRAL.get(name, ())):
            reason = _REASONS.get(name, "leave it out")
            raise ApiError(400, f"{name}: is not supported: {reason}", param=name, code="unsupported_parameter")


def _check_tools(tools: Any) -> None:
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        is_function = isinstance(tool, dict) and tool.get("type") == "function"
        function = tool.get("function") if is_function else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            message = 'needs {"type": "function", "function": {"name": ...}}'
            raise ApiError(400, f"tools[{index}]: {message}", param=f"tools[{index}]", code="invalid_value")
        schema = function.get("parameters") or {}
        if not isinstance(schema, dict) or not isinstance(schema.get("properties") or {}, dict):
            place = f"tools[{index}].function.parameters"
            raise ApiError(400, f"{place}: needs the JSON schema of an object", param=place, code="invalid_value")
