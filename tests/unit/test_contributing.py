"""Run the examples of CONTRIBUTING.md: their own tests are collected here, and what they show is compared.

The examples import engines' and trainers' libraries as any test of these parts does, so they share a process with it.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coati_rl.observability.timeline import NO_TIMELINE
from coati_rl.types import Lease, Prompt, SamplingParams
from producer.engines.fake_engine import FakeEngine
from producer.group_runner import GroupRunner
from tests.integration.engines import test_engine_contract as contract
from tests.integration.engines.conftest import VOCAB_SIZE, save_checkpoint
from tests.integration.engines.engine_process import hosted_engine
from tests.integration.engines.harness import MAX_MODEL_LEN, Harness

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
KINDS = ["A loss", "An objective", "An engine", "An environment", "A reward", "A task"]
FOLDER = Path(tempfile.gettempdir()) / f"coati-examples-{secrets.token_hex(8)}"  # there while the tests below run


def blocks(language: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def section(title: str) -> str:
    return TEXT.partition(f"\n### {title}\n")[2].partition("\n### ")[0].partition("\n## ")[0]


def file_of(code: str) -> Path:
    """The first line of an example is its file's name."""
    return FOLDER / code.splitlines()[0].removeprefix("# ")


def load(code: str) -> ModuleType:
    """Import an example under its file's name, without the file: pytest collects more tests than it runs."""
    path = file_of(code)
    module = ModuleType("example_fixtures" if path.stem == "conftest" else path.stem)
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(code, path, "exec"), vars(module))
    return module


def examples() -> Iterator[tuple[str, Any]]:
    """By name, for pytest to collect; an example's tests are named after its file."""
    for module in [load(code) for code in blocks("python")]:
        for name, value in vars(module).items():
            if name.startswith("test_"):
                yield f"{module.__name__}_{name.removeprefix('test_')}", value
            elif isinstance(value, type(pytest.fixture(lambda: None))):
                yield name, value


globals().update(examples())


@pytest.fixture(scope="module", autouse=True)
def files() -> Iterator[None]:
    """The files of all examples."""
    FOLDER.mkdir(mode=0o700)
    try:
        for code in blocks("python"):
            file_of(code).write_text(code, encoding="utf-8")
        yield
    finally:
        shutil.rmtree(FOLDER)


@pytest.mark.parametrize("title", KINDS)
def test_every_kind_of_part_has_an_example(title: str) -> None:
    assert blocks("python", section(title)) or blocks("bash", section(title))


def run_shell(title: str) -> subprocess.CompletedProcess[str]:
    """The command of a section, in the folder of the examples."""
    (command,) = blocks("bash", section(title))
    command = command.replace(".venv/bin/python", sys.executable).replace("rl_example.py", str(ROOT / "rl_example.py"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(["bash", "-c", command], cwd=FOLDER, env=environment, capture_output=True, text=True)


@pytest.mark.full
def test_the_reward_gives_the_scores_that_are_shown() -> None:
    done = run_shell("A reward")
    scores = [json.loads(line) for line in done.stdout.splitlines()]
    assert scores == [json.loads(line) for line in blocks("json", section("A reward"))[0].splitlines()], done.stderr


@pytest.mark.full
def test_the_run_of_two_tasks_has_a_plan_with_their_prompts() -> None:
    done = run_shell("A task")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^prompts +2$", done.stdout, re.MULTILINE)


def test_the_environment_runs_with_an_engine() -> None:
    """As a producer runs it: seeds and episodes are the lease's."""
    prompt = Prompt(uid="row-0", token_ids=(5, 6, 7), ground_truth="72")
    lease = Lease(lease_id=1, prompt=prompt, group_size=2, sampling=SamplingParams(max_new_tokens=8))
    engine = FakeEngine(vocab_size=50, eos_token_id=0, max_model_len=64)

    environment = sys.modules["second_try"].SecondTry(user_says=[9])
    runner = GroupRunner(engine, environment, max_sequences=2, group_size=2, timeline=NO_TIMELINE)
    runner.submit([lease], min_policy_version=0)
    (rolled_out,) = runner.take_finished(timeout_s=30.0)
    runner.close()
    engine.close()
    assert rolled_out.error is None
    first, second = rolled_out.trajectories
    assert [len(first.turns), len(second.turns)] == [2, 2]
    assert first.token_ids.tolist() != second.token_ids.tolist()
    assert first.loss_mask.sum() == len(first.logprobs)
    assert first.token_ids[first.turns[1].start - 1] == 9


def test_the_engine_keeps_the_contract_of_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a branch of `create_engine`. The rest of the contract is about sampling, and this engine samples nothing."""
    make_engine = sys.modules["repeat_engine"].make_repeat_engine
    monkeypatch.setattr(
        "producer.engines.create_engine",
        lambda _, options, **others: make_engine(options, vocab_size=VOCAB_SIZE, **others),
    )
    checkpoints = [save_checkpoint(tmp_path / str(seed), seed, tied=True) for seed in (0, 1)]
    with hosted_engine("repeat", model=str(checkpoints[0]), max_model_len=MAX_MODEL_LEN) as engine:
        harness = Harness(engine, checkpoints)
        harness.has_model = False
        contract.test_staging_leaves_the_old_weights_serving_until_the_commit(harness)
        contract.test_an_update_is_received_while_requests_run(harness)
        contract.test_only_the_staged_version_can_be_committed(harness)
        contract.test_a_transfer_that_fails_leaves_the_old_weights_serving(harness)
        contract.test_an_update_that_is_not_this_model_is_refused_before_a_byte_is_sent(harness, "wrong shape")
        harness.sender.close()
        contract.test_unfinished_requests_need_different_ids(harness)
        assert engine.version() == max(harness.checkpoint_of) > 0  # the last one that was committed
