"""Write JSON that may stand inside an HTML script element, whatever texts are in it."""

import json
import re
from typing import Any

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def as_json(data: Any) -> bytes:
    """Return JSON that may stand inside a script element; half of a surrogate pair is its escape."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda found: _ESCAPES[found[0]], text).encode("utf-8", "backslashreplace")
