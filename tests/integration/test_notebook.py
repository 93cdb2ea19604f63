"""Execute the notebook cell by cell, as Jupyter does: in one namespace, in order."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "examples" / "library.ipynb"

# Executes each cell and prints the value of an expression at its end, as a kernel does.
KERNEL = """
import ast, json, sys
namespace = {"__name__": "__main__"}
for number, source in enumerate(json.load(sys.stdin)):
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, f"cell {number}", "exec"), namespace)
    if last is not None:
        print(repr(eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), namespace)))
"""


def test_the_cells_run_in_order_and_the_model_learns(tmp_path: Path) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells), "outputs are not kept: clear them before a commit"
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")  # the root of a clone, whose runs/ are the test's own
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        input=json.dumps(["".join(cell["source"]) for cell in cells]),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = map(float, re.findall(r"accuracy ([\d.]+) -> ([\d.]+)", done.stdout)[0])
    assert after - before >= 0.4
    assert (tmp_path / "runs" / "notebook" / "checkpoint" / "model.safetensors").is_file()
