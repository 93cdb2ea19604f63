"""Carry out the lines of scripts/Dockerfile in a Debian that debootstrap makes, and run commands in it."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "scripts" / "Dockerfile"
STEP_S = 2400.0
# What a machine's own pip needs, for an index or a certificate that is not the public one: seen, not copied. A package
# of the image writes its own certificates, and its lines fill /opt.
CERTIFICATES = "/mnt/certificates.crt"
OF_PIP = {
    "/dev": "/dev",
    "/etc/pip.conf": "/etc/pip.conf",
    "/etc/ssl/certs/ca-certificates.crt": CERTIFICATES,
    "/etc/resolv.conf": "/etc/resolv.conf",
    "/etc/apt/apt.conf.d": "/etc/apt/apt.conf.d",
    "/opt": "/mnt/opt",
}


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """(instruction, arguments) of each line; the file continues no line."""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            assert not line.endswith("\\")
            word, _, rest = line.partition(" ")
            yield word, rest


class Chroot:
    """A Debian in a folder, and the environment that the lines so far have set."""

    def __init__(self, folder: Path, arguments: dict[str, str]) -> None:
        self.folder, self.arguments, self.environment = folder, arguments, dict[str, str]()
        passed = {name: value.replace("/opt/", "/mnt/opt/") for name, value in os.environ.items() if name[:4] == "PIP_"}
        self.passed = passed | {"PIP_CERT": CERTIFICATES}
        self.entrypoint: list[str] = []

    def call(self, *command: str) -> str:
        """Run a command in it, in a mount namespace of its own with /proc, /dev, and pip's files of this machine."""
        lines = ["set -e", f"mount -t proc proc {self.folder}/proc"]
        for path, place in OF_PIP.items():
            if not Path(path).exists():
                continue
            target = self.folder / place.lstrip("/")
            lines += [f"mkdir -p {target}" if Path(path).is_dir() else f"mkdir -p {target.parent}; touch {target}"]
            lines += [f"mount --rbind {path} {target}"]
        script = "; ".join([*lines, f"exec chroot {self.folder} {shlex.join(command)}"])
        environment = {"HOME": "/root", "TERM": "dumb", **self.arguments, **self.environment, **self.passed}
        done = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script],
            env={"PATH": os.environ["PATH"], **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STEP_S,
        )
        assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}"
        return done.stdout

    def carry_out(self, word: str, rest: str) -> None:
        """Do what `docker build` does for a line."""
        if word == "ARG":
            name, _, value = rest.partition("=")
            self.arguments.setdefault(name, value)
        elif word == "ENV":
            self.environment |= dict(part.split("=", 1) for part in shlex.split(rest))
        elif word == "RUN":
            self.call("/bin/sh", "-c", rest)
        elif word == "COPY":
            source, target = rest.split()
            assert source == "."
            self._copy(self.folder / target.lstrip("/"))
        elif word == "WORKDIR":
            (self.folder / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "ENTRYPOINT":
            self.entrypoint = re.findall(r'"([^"]*)"', rest)
        else:
            assert word in ("FROM", "CMD"), f"{word}: unknown to this test"

    def _copy(self, target: Path) -> None:
        """Copy what git knows of the working tree."""
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chroot]:
    missing = [name for name in ("debootstrap", "chroot", "unshare") if shutil.which(name) is None]
    assert not missing, f"missing: {', '.join(missing)}; apt install debootstrap, and root's rights"
    folder = tmp_path_factory.mktemp("image")
    lines = list(instructions(DOCKERFILE.read_text()))
    assert lines[0] == ("FROM", "debian:12-slim")
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", "bookworm", folder], capture_output=True, text=True, timeout=STEP_S
    )
    assert made.returncode == 0, made.stdout[-2000:]
    chroot = Chroot(folder, {"DEVICE": "cpu", "TORCH_CPU_INDEX": ""})
    for word, rest in lines:
        chroot.carry_out(word, rest)
    yield chroot
    shutil.rmtree(folder)


def test_every_line_can_be_carried_out_and_the_entrypoint_answers(image: Chroot) -> None:
    assert "commands:" in image.call(*image.entrypoint, "--help")


def test_a_model_learns_in_the_image(image: Chroot) -> None:
    image.call("python", "/opt/coati-rl/scripts/make_tiny_model.py", "/workspace/tiny", "--steps", "1")
    job = ["sft", "-m", "/workspace/tiny", "-d", "/workspace/rows.jsonl", "--max-steps", "2", "--run-dir"]
    row = '{"prompt": "1 + 1 =", "completion": "2"}\n'
    (image.folder / "workspace" / "rows.jsonl").write_text(row * 64)
    assert "done: " in image.call(*image.entrypoint, *job, "/workspace/run", "-tbs", "8", "--plain")
