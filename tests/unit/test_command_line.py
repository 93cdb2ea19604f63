"""Test the console script `coati-rl`: its commands, what it imports, and that packaging names all that it needs."""

import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

from coati_rl.command_line import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]


def test_help_lists_each_command_and_imports_none_of_them() -> None:
    code = (
        "import sys; from coati_rl.command_line import main; code = main(['--help']);"
        "print(code, sorted(m for m in sys.modules if m in ('rl_example', 'rewards', 'pydantic', 'torch', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    assert [line.split()[0] for line in done.stdout.partition("commands:\n")[2].splitlines()[: len(COMMANDS)]] == list(
        COMMANDS
    )


def test_a_command_whose_standard_streams_are_closed_ends_as_it_would() -> None:
    for words, code in (("--help", 0), ("dpoo", 2)):
        command = ["bash", "-c", f'"$0" -m coati_rl.command_line {words} >&- 2>&-', sys.executable]
        assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == code


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_a_function_that_exists(name: str) -> None:
    module, _, function = COMMANDS[name][0].partition(":")
    assert callable(getattr(import_module(module), function))


def test_a_command_that_does_not_exist_is_answered_with_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dpoo"]) == 2
    assert capsys.readouterr().err == f"coati-rl: no command 'dpoo'; use one of {', '.join(COMMANDS)}\n"


def test_a_commands_arguments_reach_it_and_its_exit_code_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["score", "--type"])
    assert exit_.value.code == 2
    assert "usage: coati-rl score" in capsys.readouterr().err


@pytest.mark.full
def test_a_wheel_holds_every_package_the_script_the_presets_and_the_names_of_others(tmp_path: Path) -> None:
    build = "import setuptools.build_meta as backend, sys; backend.build_wheel(sys.argv[1])"
    copy = tmp_path / "source"
    listing = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listing.stdout.split():
        packaged = {"coati_rl", "producer", "consumer", "rewards", "rl_example.py", "rl_generate.py", "setup.py"}
        if name.split("/")[0] in packaged:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=copy, check=True, capture_output=True)
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    missing = [
        path.relative_to(copy).as_posix()
        for path in copy.rglob("*")
        if path.suffix in {".py", ".yaml", ".json", ".html", ".css", ".js"}
        and "build" not in path.relative_to(copy).parts
        and path.name != "setup.py"
        if path.relative_to(copy).as_posix() not in wheel.namelist()
    ]
    assert not missing
    entry_points = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "coati-rl = coati_rl.command_line:main" in wheel.read(entry_points).decode()
