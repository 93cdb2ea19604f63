"""Test the library's own loop on GPUs: engine and trainer in one process, which share a GPU."""

from pathlib import Path

import pytest

from tests.integration.test_library import EXAMPLES, TORCHRUN, accuracies, lines_of, run, tiny  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.full, pytest.mark.timeout(900)]
OWN_LOOP = str(EXAMPLES / "own_loop.py")


def test_an_engine_in_the_trainers_process_serves_what_is_pushed(tiny: Path, tmp_path: Path) -> None:  # noqa: F811
    output = run(OWN_LOOP, str(tiny), "--steps", "3", cwd=tmp_path)
    assert len(lines_of(output)) == 3
    assert max(gap for _, gap in lines_of(output)) < 0.02  # nats, in bf16
    assert accuracies(output)


def test_processes_of_torchrun_have_a_gpu_each(tiny: Path, tmp_path: Path) -> None:  # noqa: F811
    output = run(*TORCHRUN, OWN_LOOP, str(tiny), "--steps", "2", cwd=tmp_path)
    assert len(lines_of(output)) == 2 * 2  # each process prints
    assert max(gap for _, gap in lines_of(output)) < 0.02
