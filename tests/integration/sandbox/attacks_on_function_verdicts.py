"""List functions that try to pass tests without knowing the value: each is wrong. All define f of one argument."""

from tests.integration.sandbox.attacks_on_verdicts import SEARCH, Forgery

OF_FUNCTIONS = (
    Forgery(name="a function that returns nothing", source="def f(x): pass"),
    Forgery(name="no function", source="", detail="KeyError"),
    Forgery(name="no function, but one of a library", source="from math import *\ng = gcd", detail="KeyError"),
    Forgery(name="a class without the method", source="class Solution: pass", detail="AttributeError"),
    Forgery(
        name="an object that is equal to everything",
        source="""
class Equal:
    def __eq__(self, other): return True
    def __hash__(self): return 0
def f(x): return Equal()
""",
        detail="Equal is returned",
    ),
    Forgery(
        name="text, numbers and lists that are equal to everything",
        source="""
def equal(kind):
    return type("Equal", (kind,), {"__eq__": lambda self, other: True, "__hash__": lambda self: 0})
def f(x): return equal(list)([equal(str)("x"), equal(int)(1), equal(dict)(a=1)])
""",
    ),
    Forgery(name="not a number", source="def f(x): return float('nan')"),
    Forgery(name="infinity", source="def f(x): return float('inf')"),
    Forgery(
        name="an array that says what it likes to be",
        source="class Array:\n    def tolist(self): return {'verdict': 'ok'}\ndef f(x): return Array()",
    ),
    Forgery(
        name="a list in itself", source="def f(x):\n    y = []\n    y.append(y)\n    return y", detail="exit code 1"
    ),
    Forgery(name="a list without end", source="def f(x): return iter(int, 1)"),
    Forgery(name="a deep list", source="def f(x):\n    for _ in range(900): x = [x]\n    return x"),
    Forgery(
        name="JSON in the place of the value",
        source="""
import json
json.dumps = lambda *_, **__: '{"verdict": "ok"}'
def f(x): return x
""",
    ),
    Forgery(
        name="writes the value and leaves",
        source="import os\ndef f(x):\n    os.write(3, b'true')\n    os._exit(0)",
    ),
    Forgery(
        name="several values",
        source="import os\ndef f(x):\n    os.write(3, b'true\\nfalse\\n')\n    return 1",
    ),
    Forgery(
        name="as many brackets as there may be",
        source="import os\ndef f(x):\n    os.write(3, b'[' + b'[],' * 5 * 10**6 + b'[]]')\n    os._exit(0)",
        detail=": expected ",
    ),
    Forgery(
        name="brackets that are not closed",
        source="import os\ndef f(x):\n    os.write(3, b'[' * 16 * 10**6)\n    os._exit(0)",
        detail=": expected ",
    ),
    Forgery(
        name="a number of a million digits",
        source="import os\ndef f(x):\n    os.write(3, b'9' * 10**6)\n    os._exit(0)",
        detail=": expected ",
    ),
    Forgery(name="searches for the value", source=SEARCH + "def f(x): return sorted(found)[-1] if found else None"),
    Forgery(
        name="changes its argument and returns it",
        source="def f(x):\n    x.clear() if hasattr(x, 'clear') else None\n    return x",
    ),
)
