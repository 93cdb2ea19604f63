"""Test that attacks on a sandbox whose owner is not root are contained and leave nothing."""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from typing import Any

import pytest

from tests.integration.sandbox import other_user
from tests.integration.sandbox.attack import Attack
from tests.integration.sandbox.conftest import PROJECT, Target

# What a process may see and call depends on who owns the sandbox; limits of resources hardly do.
IN_FAST_SUITE = (*other_user.ON_ISOLATION, *other_user.ON_RESOURCES[::6])


@pytest.fixture(scope="module")
def as_other_user(request: pytest.FixtureRequest, target: Target) -> dict[str, dict[str, Any]]:
    """By the attack's name, what became of it when the sandbox's owner is not root.

    The interpreter, its packages and the project are shown in a place where any user may read them.
    """
    with tempfile.TemporaryDirectory(prefix="coati-other-", dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        binds: list[str] = []
        for name, shown in (
            ("python", sys.base_prefix),
            ("packages", sysconfig.get_path("purelib")),
            ("project", str(PROJECT)),
        ):
            os.mkdir(f"{folder}/{name}")
            binds += ["--ro-bind", os.path.realpath(shown), f"{folder}/{name}"]
        rights = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if os.geteuid() == 0 else []
        python = f"{folder}/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        attacks = other_user.ATTACKS if request.config.getoption("--all") else IN_FAST_SUITE
        told = (json.dumps(target.places), json.dumps([attack.name for attack in attacks]))
        command = [python, "-m", "tests.integration.sandbox.other_user", *told]
        done = subprocess.run(
            [
                "bwrap",
                "--dev-bind",
                "/",
                "/",
                *binds,
                "--die-with-parent",
                "--chdir",
                f"{folder}/project",
                *rights,
                *command,
            ],
            env={**os.environ, "COATI_SECRET": target.secret, "PYTHONPATH": f"{folder}/packages"},
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, done.stderr
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(attack, id=attack.name, marks=() if attack in IN_FAST_SUITE else pytest.mark.full)
        for attack in other_user.ATTACKS
    ],
)
def test_an_attack_is_held_as_well_when_the_sandbox_s_owner_is_not_root(
    attack: Attack, as_other_user: dict[str, dict[str, Any]], target: Target
) -> None:
    after = as_other_user[attack.name]
    assert after["user"] != 0
    assert after["end"] in attack.ends, after
    assert attack.prints is None or after["output"] == attack.prints, after
    assert target.secret not in after["output"] + after["error_output"]
    assert after["is_alone"]
    assert after["next_output"] == "next\n"
