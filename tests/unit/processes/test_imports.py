"""Test that imports run without the garbage collector, which does not look at what they made later."""

import gc
import subprocess
import sys

import pytest

from coati_rl.processes.imports import uncollected


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_off_in_the_body_and_then_as_before_also_after_an_error(is_enabled: bool) -> None:
    try:
        (gc.enable if is_enabled else gc.disable)()
        with pytest.raises(ModuleNotFoundError), uncollected():
            seen = gc.isenabled()
            import no_such_module  # type: ignore[import-not-found]  # noqa: F401
        assert (seen, gc.isenabled()) == (False, is_enabled)
    finally:
        gc.enable()


def test_what_the_first_body_leaves_is_never_collected_and_what_a_second_one_leaves_is() -> None:
    program = """
import gc, weakref
from coati_rl.processes.imports import uncollected
class Node: pass
for _ in range(2):
    with uncollected():
        node = Node()
        node.self = node
    seen = weakref.ref(node)
    del node
    gc.collect()
    print(seen() is None)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
