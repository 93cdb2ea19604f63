"""Check the files that other tools read: CITATION.cff, .pre-commit-config.yaml, and what scripts/check accepts."""

import ast
import os
import re
import shutil
import subprocess
import venv
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from coati_rl import __version__

ROOT = Path(__file__).resolve().parents[2]


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def hooks() -> dict[str, dict[str, Any]]:
    return {hook["id"]: hook for repo in read_yaml(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]}


def setup_arguments() -> dict[str, Any]:
    """The literal arguments of setup()."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (call,) = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "setup"]
    return {word.arg or "": word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}


def setup_list(name: str) -> list[str]:
    """A literal list among them."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (found,) = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == name]
    return list(ast.literal_eval(found))


def test_the_citation_has_what_its_format_requires_and_names_the_version() -> None:
    citation = read_yaml("CITATION.cff")
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}  # required by CFF 1.2.0
    assert citation["cff-version"] == "1.2.0"
    assert citation["authors"] == [{"name": "The Coati-RL developers"}]
    assert (citation["version"], citation["license"]) == (__version__, setup_arguments()["license"])
    assert citation["type"] == "software"


def test_the_changelog_begins_with_the_version_or_with_what_comes_next() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"(?m)^## (\d+\.\d+\.\d+) \(\d{4}-\d\d-\d\d\)$", changelog)
    assert versions[0] == __version__
    assert re.findall(r"(?m)^## (?!\d)(.+)$", changelog) in ([], ["Unreleased"])


def test_the_hooks_of_ruff_have_the_version_of_the_environment() -> None:
    pinned = re.search(r"^ruff==.*$", (ROOT / "requirements" / "cpu.in").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    for name in ("ruff-check", "ruff-format"):
        assert hooks()[name]["additional_dependencies"] == [pinned[0]]


MYPY, RULES, COLLECTION = {"mypy"}, "test_repository.py", "--collect-only"
CHECKS = {"ruff check", "ruff format", "importlinter", *MYPY, RULES, COLLECTION}


@pytest.mark.parametrize(
    ("arguments", "left_out"),
    [
        ([], set()),
        (["--fast"], {*MYPY, COLLECTION}),
        (["--lint"], {*MYPY, RULES, COLLECTION}),
        (["--types"], {*CHECKS} - MYPY),
    ],
)
@pytest.mark.parametrize("python", ["true", "false"])
def test_what_the_checks_run_and_that_one_that_fails_is_told(
    tmp_path: Path, arguments: list[str], left_out: set[str], python: str
) -> None:
    """With `true` or `false` in Python's place."""
    shutil.copy(ROOT / "scripts" / "check", tmp_path)
    (tmp_path / "environment.sh").write_text(f"REPOSITORY={tmp_path} PYTHON={python}\n")
    done = subprocess.run([tmp_path / "check", *arguments], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert {name for name in CHECKS if any(name in line for line in lines)} == CHECKS - left_out
    assert (done.returncode, done.stderr) == (python == "false", "")


def test_a_commit_runs_the_fast_checks() -> None:
    assert hooks()["check-fast"]["entry"] == "scripts/check --fast"


@pytest.mark.parametrize("arguments", [["--quick"], ["--fast", "now"]])
def test_another_argument_of_the_checks_is_refused_before_an_environment_is_made(arguments: list[str]) -> None:
    done = subprocess.run([ROOT / "scripts" / "check", *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"scripts/check {' '.join(arguments)}: use --fast, --lint, --types or no argument\n"


def test_a_package_is_not_built_by_a_python_without_setuptools(tmp_path: Path) -> None:
    """As python3 is from 3.12 on, where the package is installed without .venv."""
    venv.create(tmp_path / "bare")
    python, script = tmp_path / "bare/bin/python", ROOT / "scripts/build_package.sh"
    environment = {**os.environ, "PYTHON": str(python), "PYTHONPATH": ""}
    done = subprocess.run([script, tmp_path / "dist"], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    remedy = "make .venv (source scripts/environment.sh), or set PYTHON"
    assert done.stderr == f"{python}: has no setuptools, which builds packages: {remedy}\n"
    assert not (tmp_path / "dist").exists()


def installed_with(packages: Iterable[str]) -> set[str]:
    """Their names, and those of all that they ask for."""
    found: set[str] = set()
    names = [*packages]
    while names:
        name = re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", names.pop())[0]).lower()  # type: ignore[index]
        if name not in found:
            found.add(name)
            with suppress(metadata.PackageNotFoundError):
                names += [each for each in metadata.requires(name) or () if "extra ==" not in each]
    return found


def imported_modules() -> set[str]:
    """Top-level modules that the product imports, at any place."""
    found: set[str] = set()
    for path in (path for each in PACKAGES for path in (ROOT / each).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found |= {name.partition(".")[0] for name in names}
    return found


@pytest.mark.full
def test_without_an_extra_only_what_is_for_an_extra_cannot_be_imported() -> None:
    installed, packages = installed_with(setup_list("install_requires")), metadata.packages_distributions()
    names = {module: {re.sub(r"[-_.]+", "-", each).lower() for each in found} for module, found in packages.items()}
    others = {module for module in imported_modules() & names.keys() if not names[module] & {*installed, "coati-rl"}}
    assert others == OF_EXTRAS


# Of engines, tools and trackers; each is imported where it is used.
OF_EXTRAS = {
    "bitsandbytes", "colossalai", "cupy", "mcp", "mcp_types", "nltk", "peft", "textarena", "vllm", "wandb"
}  # fmt: skip
PACKAGES = ("coati", "coati_rl", "producer", "consumer", "rewards")
