"""README and docs/ name flags, files, pages and headings that exist; each command of theirs is executed, or says why
not."""

import fnmatch
import re
import shlex
from functools import cache
from pathlib import Path

import check_docs
import docs_site
import make_config_reference
import make_gpu_plans
import pytest
import yaml

from coati_rl.config import Config
from coati_rl.config.commands import ALL
from coati_rl.config.fields import described, spelling

ROOT = check_docs.ROOT
PAGES = check_docs.pages()
OF_OTHERS = "coming_from"  # a folder whose pages name flags and files of other frameworks
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
LINKED = [
    *PAGES,
    *DECISIONS,
    *ROOT.glob("CONTRIBUTING.md"),
    ROOT / "scripts/bench/README.md",
    ROOT / "requirements/README.md",
]
FOLDERS = ("coati", "coati_rl", "producer", "consumer", "rewards", "scripts", "tests", "docs", "requirements", ".ci")
# Flags of other programs that the pages name, by program.
OTHERS_FLAGS = {
    "tensorboard": "--logdir",
    "pytest": "--all -k -m",  # --all is tests/conftest.py's
    "pip, apt": "--upgrade --no-deps --require-hashes --index-url --extra-index-url",
    "mkdocs": "--strict",
    "ray start": "--head --port --node-ip-address --address --node-manager-port --object-manager-port --min-worker-port"
    " --max-worker-port",
    "sbatch, scancel": "--nodes --gpus-per-node --batch --signal",
    "python": "-c -I -S",
    "mypy": "--strict",
    "torchrun": "--nproc-per-node --nnodes --node-rank --master-addr --master-port",
    "ray job submit": "--address --working-dir --runtime-env-json",
    "docker": "--build-arg --rm --shm-size --gpus --ipc",
    "sglang": "--model-path --context-length --enable-deterministic-inference --kv-cache-dtype",
    "vllm serve": "--dtype --logprobs-mode --enable-scale-out --no-enable-chunked-prefill --max-num-batched-tokens"
    " --worker-extension-cls",
}
METRICS = {f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")}  # like a path in rewards/
NAMES_OF_THE_READER = {"FILE.py", "brevity.py", "own_loss.py"}  # besides the files that a page's blocks are


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def files() -> frozenset[str]:
    """Every file and folder of the repository, as a path from the root."""
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    return frozenset(name_of(path) for path in [*below, *(ROOT / f for f in FOLDERS), *ROOT.glob("*.*")])


@cache
def run_flags(command: str = "rl") -> frozenset[str]:
    """The flags of a command, with hyphens."""
    fields = ALL[command].fields().items()
    names = {spelling(name, field) for name, field in fields}
    names |= {described(field, "short") or "" for _, field in fields}
    names |= {alias for _, field in fields for alias in described(field, "aliases") or ()}
    names |= {f"--no-{spelling(name, field)[2:]}" for name, field in fields if field.annotation in (bool, bool | None)}
    return frozenset(name.replace("_", "-") for name in names if name) | {"--config", "--dry-run", "--help"}


@cache
def all_flags() -> frozenset[str]:
    """The flags of rl_example.py, of our scripts and commands, and of other programs that are named."""
    sources = [
        *(ROOT / "scripts").rglob("*.py"),
        *(ROOT / "scripts").glob("*[!.]*"),
        *ROOT.glob("rewards/commands/*.py"),
        ROOT / "coati_rl/run_reader/show.py",
        ROOT / "coati_rl/report/report_command.py",
        ROOT / "coati_rl/report/watch_command.py",
        ROOT / "coati_rl/replay/command.py",
        ROOT / "coati_rl/doctor/command.py",
        ROOT / "coati_rl/rehearsal/command.py",
        ROOT / "coati_rl/runtime/join_command.py",
        ROOT / "coati/join.py",
        ROOT / "coati_rl/tinker/command.py",
        ROOT / "docs/examples/own_loop.py",
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources if path.is_file())
    own = re.findall(r"[\"'\s](--[a-z][\w-]+)", text)
    others = [flag for flags in OTHERS_FLAGS.values() for flag in flags.split()]
    trained = frozenset().union(*(run_flags(command) for command in ALL))
    return trained | {flag.replace("_", "-") for flag in (*own, *others)}


def spans(page: Path) -> list[str]:
    """The inline code of a page, outside of fenced blocks."""
    prose = check_docs.FENCE.sub("", page.read_text(encoding="utf-8"))
    return [match[1] for match in re.finditer(r"(?<!`)`([^`\n]+)`(?!`)", prose)]


def command_lines(page: Path) -> list[str]:
    """The lines of a page that a shell reads, executed or not, with continued ones joined."""
    lines: list[str] = []
    for block in check_docs.blocks(page):
        if block.language == "console":
            lines += [command.text for command in check_docs.commands(block)]
        elif block.language == "bash":
            lines.append(block.text)
    return [line for text in lines for line in text.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_block_of_commands_is_executed_or_says_why_not(page: Path) -> None:
    for block in check_docs.blocks(page):
        place = f"{page.name}:{block.line}"
        assert block.language, f"{place}: say the language, text if it is none"
        assert block.language not in ("sh", "shell"), f"{place}: use console, or bash with a reason"
        if block.language == "bash":
            assert block.reason, f"{place}: a bash block is not executed: say why, or make it a console block"
        if block.language == "console":
            assert list(check_docs.commands(block))


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != OF_OTHERS], ids=name_of)
def test_flags_that_a_page_names_exist(page: Path) -> None:
    unknown = []
    for line in command_lines(page):
        named_command = re.search(rf"rl_example\.py|coati-rl (?:{'|'.join(ALL)})(?= )", line)
        if named_command:
            after, known = line[named_command.end() :], run_flags(named_command[0].partition("coati-rl ")[2] or "rl")
            words = shlex.split(after.partition(" | ")[0], comments=True)
            flags = [re.sub(r"\d+$", "", word.partition("=")[0]) for word in words if re.match(r"--?[A-Za-z]", word)]
            unknown += [flag for flag in flags if flag.replace("_", "-") not in known | {"--num-generation"}]
        else:
            unknown += [flag for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", line) if flag not in all_flags()]
    for span in spans(page):
        named = re.findall(r"(?<![\w-])--[A-Za-z][\w-]*", span) + re.findall(r"^-[A-Za-z]+(?= |$)", span)
        unknown += [flag for flag in named if flag.replace("_", "-") not in all_flags()]
    assert not unknown, unknown


@pytest.mark.parametrize("page", [page for page in LINKED if page.parent.name != OF_OTHERS], ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    missing = []
    text = page.read_text(encoding="utf-8")
    own = NAMES_OF_THE_READER | set(re.findall(r'^(?:```\w+ title="|# )([\w.]+)"?$', text, re.MULTILINE))
    for span in spans(page):
        for word in re.findall(r"[\w./*-]+", span):
            name = word.strip("./").removeprefix("./") if not word.startswith(".ci") else word
            is_source = re.search(r"\.(py|sh|md|toml)$", name) and Path(name).name not in own
            is_path = "/" in name and name.split("/")[0] in FOLDERS and name not in METRICS
            if (is_source or is_path) and not is_there(name):
                missing.append(word)
    assert not missing, missing


@cache
def ends_of_paths() -> frozenset[str]:
    """Every file and folder, as a path from the root and from each folder above it."""
    parts = [path.split("/") for path in files()]
    return frozenset("/".join(each[start:]) for each in parts for start in range(len(each)))


@cache
def is_there(name: str) -> bool:
    """True if `name` is a file or folder: from the root, from the page, or the end of a path (data/dataset.py)."""
    if "*" not in name:
        return name in ends_of_paths()
    return any(fnmatch.fnmatch(path, pattern) for pattern in (name, f"*/{name}") for path in files())


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and mkdocs make it."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", re.sub(r"`|\[|\]\([^)]*\)", "", heading).lower()).strip())


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = check_docs.FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.is_file(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(
                r"^#+ (.*)$", check_docs.FENCE.sub("", other.read_text(encoding="utf-8")), re.MULTILINE
            )
            assert anchor in {slug(heading) for heading in headings}, f"{page.name}: {target}"


@pytest.mark.full
def test_the_plans_of_the_gpu_page_are_the_planners() -> None:
    current = make_gpu_plans.PAGE.read_text(encoding="utf-8")
    assert current == make_gpu_plans.page(), "run python scripts/make_gpu_plans.py"
    assert all(f"| {model} | 64 | `-t" in current for model in make_gpu_plans.MODELS)


def test_70b_on_32_sharded_trainers_takes_75_gib_of_a_gpu_at_most_and_an_engines_host_1_2_times_the_model() -> None:
    plan = make_gpu_plans.plan_of("Llama-70B", 64)
    assert not isinstance(plan, str)
    trainer, engine = plan.forecast.processes
    assert trainer.count == engine.count == 32 and plan.config.parallel.plugin == "fsdp2"
    assert max(trainer.device_bytes, engine.device_bytes) <= 75 * 2**30
    assert sum(engine.on_one_host("cuda").values()) <= 1.2 * 2 * 70_553_706_496


def test_the_configuration_page_is_what_the_config_model_says() -> None:
    current = make_config_reference.PAGE.read_text(encoding="utf-8")
    assert current == make_config_reference.page(), "run python scripts/make_config_reference.py"
    assert all(f"| `{short}` |" in current for short in ("-m", "-d", "-tbs", "-ptp"))


@pytest.mark.parametrize(
    ("job", "name", "kind", "default"),
    [
        (Config, "offload", "`optimizer`, `reference`, `teacher`, `old`, `all`, or several", ""),
        (Config, "adam_betas", "BETA1,BETA2", "`0.9,0.999`"),
        (ALL["prm"], "reward_tokens", "text, repeated", "`+`, `-`"),
        (Config, "stop", "text, repeated", ""),
    ],
)
def test_the_configuration_page_says_which_values_a_list_takes(job, name, kind, default) -> None:
    (row,) = [*make_config_reference.table_lines(job, {name: job.fields()[name]})][2:]
    assert row.split(" | ")[2:4] == [kind, default]


def test_no_cell_of_a_table_is_an_empty_code_span_or_a_bare_none() -> None:
    empty = [
        f"{name_of(page)}: {line}"
        for page in LINKED
        for line in check_docs.FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
        if line.startswith("|") and re.search(r"\| *(?:``|None) *\|", line)
    ]
    assert not empty, empty


def test_the_site_has_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]

    def leaves(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [leaf for part in parts for leaf in leaves(part)]  # type: ignore[attr-defined]

    docs = ROOT / "docs"
    written = {path.relative_to(docs).as_posix() for path in [*docs.glob("*.md"), *docs.glob("*/README.md")]}
    written |= {page for source, page in docs_site.PAGES.items() if (ROOT / source).is_file()}
    assert sorted(leaves(nav)) == sorted(written)
    listed = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in DECISIONS if path.name != "README.md" and f"({path.name})" not in listed] == []


def test_the_readme_is_short() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.encode()) <= 16_000
    package_map = readme.partition("| package |")[2].partition("\n\n")[0]
    assert len(package_map.splitlines()) - 2 <= 25
    tops = {name for line in package_map.splitlines()[2:] for name in re.findall(r"`([\w/]+)/`", line.split("|")[1])}
    packages = {
        f"{root}/{path.name}"
        for root in FOLDERS[:3]
        for path in (ROOT / root).iterdir()
        if (path / "__init__.py").is_file()
    }
    assert [package for package in sorted(packages) if not any(package.endswith(top) for top in tops)] == []
