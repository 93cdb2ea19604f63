"""Serve tools over MCP with the standard library alone, so that it starts at once: a line of JSON a message.

Arguments: the names of the tools that are listed; none: all.
"""

import json
import os
import sys
import time
from typing import Any

TOOLS = {
    "add": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "fail": {},
    "die": {},
    "hang": {"seconds": {"type": "number"}},
    "garbage": {},
    "process": {},
    "megabytes": {},
    "refuse": {"code": {"type": "integer"}},
}


def listed() -> dict[str, Any]:
    """Return the parameters of the tools that are listed, by name."""
    return {name: TOOLS[name] for name in sys.argv[1:] or TOOLS}


def write(line: str) -> None:
    """Send a line."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def answer(method: str, parameters: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a request; None for a method that is unknown."""
    if method == "initialize":
        info = {"name": "echo", "version": "1"}
        return {"protocolVersion": parameters["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        schemas = {
            name: {"type": "object", "properties": each, "required": list(each)} for name, each in listed().items()
        }
        return {"tools": [{"name": name, "inputSchema": schema} for name, schema in schemas.items()]}
    if method == "tools/call":
        return call(parameters["name"], parameters.get("arguments") or {})
    return None


def reply_to(message: dict[str, Any]) -> dict[str, Any]:
    """Return the result or the error of a request."""
    parameters = message.get("params") or {}
    if parameters.get("name") == "refuse":
        return {"error": {"code": parameters["arguments"]["code"], "message": "it is refused"}}
    result = answer(message["method"], parameters)
    return {"error": {"code": -32601, "message": "unknown"}} if result is None else {"result": result}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a call."""
    if name == "die":
        os._exit(3)
    if name == "hang":
        time.sleep(arguments["seconds"])
    if name == "garbage":
        write("no JSON")
        return {"content": 3}
    texts = {
        "add": lambda: str(arguments["a"] + arguments["b"]),
        "fail": lambda: "it failed",
        "process": lambda: str(os.getpid()),
        "megabytes": lambda: "x" * (4 << 20),
    }
    text = texts.get(name, lambda: "done")()
    return {"content": [{"type": "text", "text": text}], "isError": name == "fail"}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **reply_to(message)}))
