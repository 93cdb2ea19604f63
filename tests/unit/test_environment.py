"""Test messages of scripts/environment.sh on machines with a GPU that cannot run the packages."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "awk", "cat", "cut", "dirname", "flock", "grep", "head", "mkdir", "mv", "rm", "sed", "sha256sum", "tr")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A checkout without an environment, and a PATH with a GPU of driver 570, a compiler and Python's headers."""
    for name in ("scripts/environment.sh", "setup.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / "bin").mkdir()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    add_command(tmp_path, "gcc", "exit 0")
    add_command(tmp_path, "nvidia-smi", '[[ "$1" == -L ]] && echo "GPU 0: H100" || echo 570.86.15')
    add_command(tmp_path, "python3.11", python(tmp_path))
    return tmp_path


def add_command(machine: Path, name: str, line: str) -> None:
    file = machine / "bin" / name
    file.write_text(f"#!{shutil.which('bash')}\n{line}\n")
    file.chmod(0o755)


def python(machine: Path, cuda: str = "", libc: str = "glibc 2.36") -> str:
    """A Python with torch and vLLM for this CUDA, if any; it makes no environment."""
    return f"""case "$*" in
        *libc_ver*) echo {libc} ;;
        *sysconfig*) echo {machine / "include"} ;;
        *vllm*) echo '{cuda}' ;;
        "-m venv"*) echo "venv $*"; exit 3 ;;
        *) exec {sys.executable} "$@" ;;
    esac"""


def said(machine: Path, *, is_right: bool = False, **variables: str) -> str:
    """All that is said until the environment would be made; or, if it `is_right`, is made."""
    command = ["bash", "-c", f"set -e; source {machine}/scripts/environment.sh"]
    environment = {"PATH": str(machine / "bin"), "HOME": str(machine), **variables}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert (ended.returncode == 0) == is_right, ended.stderr
    return ended.stdout + ended.stderr


def test_an_old_driver_is_named_before_anything_is_installed(machine: Path) -> None:
    text = said(machine)
    assert "the NVIDIA driver is '570.86.15' and CUDA 13 needs 580 or newer" in text
    assert "install CUDA 12 builds of torch and vllm for python3.11 first" in text and "COATI_DEVICE=cpu" in text
    assert not (machine / ".venv").exists()


def test_a_gpu_that_is_asked_for_without_its_driver_is_refused_with_the_remedy(machine: Path) -> None:
    (machine / "bin" / "nvidia-smi").unlink()
    text = said(machine, COATI_DEVICE="gpu")
    assert "nvidia-smi is not on the PATH" in text and "COATI_DEVICE=cpu" in text
    assert not (machine / ".venv").exists()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("libc", "is_taken"), [("glibc 2.28", False), ("glibc 2.31", True), ("glibc 3.0", True), ("musl 1.2.5", False)]
)
def test_an_old_c_library_is_named_before_anything_is_installed(machine: Path, libc: str, is_taken: bool) -> None:
    add_command(machine, "python3.11", python(machine, libc=libc))
    text = said(machine, COATI_DEVICE="cpu")
    assert ("venv -m venv" in text) == is_taken
    assert (f"the C library is '{libc}', and the packages need glibc 2.31 or newer" in text) != is_taken


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_lock_is_installed_from_the_package_index_alone_whatever_other_places_offer(
    machine: Path, device: str
) -> None:
    """torch 2.13.0+cpu of an extra index is preferred to 2.13.0, and the lock has no digest of it."""
    (machine / ".venv" / "bin").mkdir(parents=True)
    places = "global.extra-index-url=https://extra.test/simple\nglobal.find-links=/wheels"
    add_command(machine, "../.venv/bin/python", f'[[ "$*" != *config* ]] || echo -e "{places}"')
    add_command(machine, "../.venv/bin/uv", f'echo "$UV_INDEX,$UV_FIND_LINKS $*" >>{machine}/installed')
    assert f"ready ({device})" in said(machine, COATI_DEVICE=device, is_right=True)
    lines = (machine / "installed").read_text().splitlines()
    (lock,) = [line for line in lines if "--require-hashes" in line]
    assert lock.startswith(", ") and lock.endswith({"cpu": "/cpu.txt", "gpu": "/gpu-cu13.txt"}[device])
    assert all(line.startswith("https://extra.test/simple,/wheels ") for line in lines if line != lock)


@pytest.mark.full
def test_uv_is_told_of_each_index_where_pips_file_has_one_a_line(machine: Path) -> None:
    """uv takes what pip shows of such a file for a folder that does not exist, and goes on without these indexes."""
    (machine / "pip.conf").write_text(
        "[global]\nextra-index-url =\n  https://a.test\n  https://b.test\nfind-links=\n  /c\n  /d"
    )
    (machine / ".venv" / "bin").mkdir(parents=True)
    add_command(machine, "../.venv/bin/python", f'[[ "$*" != *config* ]] || exec {sys.executable} "$@"')
    add_command(machine, "../.venv/bin/uv", f'echo "$UV_INDEX,$UV_FIND_LINKS $*" >>{machine}/installed')
    assert "ready (cpu)" in said(machine, COATI_DEVICE="cpu", PIP_CONFIG_FILE=str(machine / "pip.conf"), is_right=True)
    assert (machine / "installed").read_text().startswith("https://a.test https://b.test,/c,/d pip install ")


def test_a_missing_compiler_is_named(machine: Path) -> None:
    (machine / "bin" / "gcc").unlink()
    assert "gcc and " in (text := said(machine)) and "apt install gcc python3-dev" in text


def test_missing_headers_of_python_are_named(machine: Path) -> None:
    (machine / "include" / "Python.h").unlink()
    assert f"{machine}/include/Python.h are needed" in said(machine)


def test_builds_for_cuda_12_that_the_machine_has_are_used(machine: Path) -> None:
    add_command(machine, "python3.11", python(machine, cuda="12"))
    assert f"venv -m venv --clear --system-site-packages {machine}/.venv" in said(machine)


def test_a_new_driver_gets_an_environment_of_its_own(machine: Path) -> None:
    add_command(machine, "nvidia-smi", '[[ "$1" == -L ]] && echo "GPU 0: H100" || echo 580.65.06')
    assert f"venv -m venv --clear {machine}/.venv" in said(machine)


def only_python3(machine: Path, answers: str) -> None:
    (machine / "bin" / "nvidia-smi").unlink()
    (machine / "bin" / "python3.11").unlink()
    add_command(machine, "python3", answers)


def test_where_python_is_too_new_uv_brings_one_that_is_not(machine: Path) -> None:
    only_python3(machine, '[[ "$*" == *print* ]] && echo 3.13')
    text = said(machine)
    assert "Python 3.11 or 3.12 with venv is needed, and python3 is 3.13." in text
    assert "apt install pipx && pipx install uv && ~/.local/bin/uv python install 3.12" in text


def test_a_python_without_venv_and_none_at_all_are_told_apart(machine: Path) -> None:
    only_python3(machine, '[[ "$*" == *print* ]] && echo 3.12')
    assert "python3 is 3.12 without venv: apt install python3-venv" in said(machine)
    (machine / "bin" / "python3").unlink()
    assert "needed, and none was found. Debian 12" in said(machine)


def test_the_python_that_uv_has_installed_is_found_where_path_lacks_it(machine: Path) -> None:
    only_python3(machine, "exit 1")
    (machine / ".local" / "bin").mkdir(parents=True)
    add_command(machine, "../.local/bin/python3.12", python(machine))
    assert f"venv -m venv --clear {machine}/.venv" in said(machine)


def made_before(machine: Path, stamp: str) -> None:
    (machine / ".venv" / "bin").mkdir(parents=True)
    (machine / ".venv" / "coati-stamp").write_text(stamp)
    add_command(machine, "../.venv/bin/python", "exit 0")
    add_command(machine, "../.venv/bin/uv", "exit 0")


def test_an_environment_of_another_device_is_made_anew_where_the_device_is_asked_for(machine: Path) -> None:
    """CPU and CUDA builds are torch 2.13.0 both, which uv would keep."""
    made_before(machine, f"gpu {machine} 0123  -")
    assert f"venv -m venv --clear {machine}/.venv" in said(machine, COATI_DEVICE="cpu")


def test_an_environment_of_another_device_is_left_where_the_machine_alone_says_so(machine: Path) -> None:
    """As on a login node without a GPU, which sees the directory that jobs with GPUs use."""
    made_before(machine, f"gpu {machine} 0123  -")
    (machine / "bin" / "nvidia-smi").unlink()
    text = said(machine)
    assert ".venv was made for gpu, and this machine's device is cpu: set COATI_DEVICE=gpu to use it, or" in text
    assert "-m venv" not in text and (machine / ".venv" / "coati-stamp").read_text().endswith(" 0123  -")


def test_the_environment_of_a_clone_that_was_moved_is_made_anew(machine: Path) -> None:
    """The first lines of its programs name the former place."""
    made_before(machine, "cpu /former/place 0123  -")
    assert f"venv -m venv --clear {machine}/.venv" in said(machine, COATI_DEVICE="cpu")


@pytest.mark.parametrize("stamp", ["cpu {} 0123  -", "cpu {}\n"])
def test_an_environment_of_other_pins_and_one_that_was_interrupted_are_completed(machine: Path, stamp: str) -> None:
    made_before(machine, stamp.format(machine))
    text = said(machine, COATI_DEVICE="cpu", is_right=True)
    assert "ready (cpu)" in text and "-m venv" not in text


def test_an_environment_of_a_python_that_the_packages_are_not_built_for_is_refused_and_left(machine: Path) -> None:
    (machine / ".venv" / "bin").mkdir(parents=True)
    newer = "import sys; sys.version_info = (3, 13, 0); exec(sys.argv[2])"
    add_command(
        machine,
        "../.venv/bin/python",
        f'[[ "$1" == --version ]] && echo Python 3.13.0 || exec {sys.executable} -c "{newer}" "$@"',
    )
    text = said(machine, COATI_DEVICE="cpu")
    assert ".venv is of Python 3.13.0, and the packages need 3.11 or 3.12: remove it, and repeat this command" in text
    assert "-m venv" not in text and not (machine / ".venv" / "coati-stamp").exists()


def sourced(machine: Path, before: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What is typed into a shell, which goes on after errors."""
    command = ["bash", "-c", f"{before}; source {machine}/scripts/environment.sh"]
    environment = {"PATH": str(machine / "bin"), "HOME": str(machine), **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, cwd=machine / "bin")


def test_a_device_that_does_not_exist_ends_the_command_in_a_shell_too(machine: Path) -> None:
    ended = sourced(machine, ":", COATI_DEVICE="cuda")
    assert (ended.returncode, ended.stderr) == (1, "[environment] error: COATI_DEVICE=cuda: use cpu or gpu\n")
    assert not (machine / ".cache").exists()


def test_another_shell_is_refused_before_anything_is_made(machine: Path) -> None:
    """zsh has no BASH_SOURCE: the environment would be made in the folder above the current one."""
    ended = sourced(machine, "unset BASH_VERSION", COATI_DEVICE="cpu")
    assert ended.returncode == 1 and "is for bash: call bash, and source it there" in ended.stderr
    assert not (machine / ".cache").exists()
