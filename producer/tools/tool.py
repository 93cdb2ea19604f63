"""Define what a tool is, and check the arguments that the policy gives it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Schema = dict[str, Any]  # in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}

_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class ToolError(Exception):
    """Report that a call has failed; the message is what the policy reads in the place of a result."""


class Tool(Protocol):
    """Serve the calls of one episode."""

    @property
    def schema(self) -> Schema:
        """Return its name, what it does and its parameters."""

    async def call(self, arguments: dict[str, Any]) -> str:
        """Run a call, which is cancelled when it takes too long.

        Args:
            arguments: JSON types; the required ones are there, and those of the schema's types.
        Returns: the result, as the policy reads it.
        Raises: ToolError where the call is at fault; EpisodeFailure where the tool is, so that the sample is invalid.
        """

    async def close(self) -> None:
        """Free what the episode holds; called once."""


class ToolKit(Protocol):
    """Make the tools of episodes; there is one for all of a producer's."""

    @property
    def schemas(self) -> Sequence[Schema]:
        """Return the schemas of its tools."""

    def open(self) -> Sequence[Tool]:
        """Return the tools of a new episode. Raises: EpisodeFailure."""

    def close(self) -> None:
        """End what runs for its tools."""


def make_schema(name: str, description: str, **parameters: str) -> Schema:
    """Return the schema of a tool whose parameters are all texts, given with their descriptions."""
    properties = {parameter: {"type": "string", "description": text} for parameter, text in parameters.items()}
    described = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": described}}


def name_of(schema: Schema) -> str:
    """Return the name of a schema's tool."""
    return str(schema["function"]["name"])


def typed_arguments(schema: Schema, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with texts read as JSON where the schema wants another type; True and None are understood.

    Some models write all values as texts. One that cannot be read stays.
    """
    properties = (schema["function"].get("parameters") or {}).get("properties") or {}
    return {name: _typed(value, _types(properties.get(name))) for name, value in arguments.items()}


def check_arguments(schema: Schema, arguments: Mapping[str, Any]) -> None:
    """Check a call's arguments against the parameters' names and types; what they hold is for the tool to check.

    Raises: ToolError that says what the tool takes.
    """
    parameters = schema["function"].get("parameters") or {}
    properties = parameters.get("properties") or {}
    problems = [f"{name} is missing" for name in parameters.get("required") or () if name not in arguments]
    if not parameters.get("additionalProperties"):
        problems += [f"it has no {name}" for name in arguments if name not in properties]
    for name, value in arguments.items():
        names = _types(properties.get(name))
        if names and not any(_has_type(value, each) for each in names):
            problems.append(f"{name} must be of the type {' or '.join(map(str, names))}")
    if problems:
        raise ToolError(f"{name_of(schema)} takes {_signature(properties)}: {', '.join(problems)}")


def _types(described: object) -> list[Any]:
    """Return the types of a parameter; none if its schema, or one of several that it may have, names none."""
    if not isinstance(described, dict):
        return []
    choices = described.get("anyOf") or described.get("oneOf")  # as of `int | None` of an MCP server
    if isinstance(choices, list):
        found = [_types(each) for each in choices]
        return [name for names in found for name in names] if all(found) else []
    wanted = described.get("type")
    return list(wanted) if isinstance(wanted, list) else [wanted] if isinstance(wanted, str) else []


def _typed(value: Any, names: list[Any]) -> Any:
    if not isinstance(value, str) or not names or "string" in names:
        return value
    try:
        read = json.loads(_CONSTANTS.get(value.strip(), value))
    except (ValueError, RecursionError):
        return value
    return read if any(_has_type(read, name) for name in names) else value


def _has_type(value: object, name: object) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if isinstance(value, float) and value.is_integer() and name == "integer":
        return True
    return isinstance(value, _TYPES.get(str(name), (object,)))


def _signature(properties: Mapping[str, Any]) -> str:
    described = [
        f"{name} ({' or '.join(map(str, types))})" if (types := _types(part)) else name
        for name, part in properties.items()
    ]
    return ", ".join(described) or "no arguments"
