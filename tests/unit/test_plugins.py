"""Test FILE.py:FUNCTION for advantage estimator and policy loss: calls, and errors that name the flag."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from coati_rl.algorithms.advantage import group_advantages, leave_one_out
from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.build import build_loss, load_terms
from coati_rl.config import Config
from coati_rl.config.cli import parse
from coati_rl.errors import ConfigError
from coati_rl.estimator import load_estimator
from coati_rl.plugins import is_plugin, load_function
from tests.unit.algorithms.batches import evaluate, lay_out, random_samples

REINFORCE = """
import torch

def terms(logprobs, old_logprobs, advantages, micro_batch):
    return -torch.where(micro_batch["loss_mask"], advantages * logprobs, 0.0)
"""


@pytest.fixture
def write(tmp_path):
    """text -> the name of its function `function` as a flag takes it."""

    def make(text: str, function: str = "terms", file: str = "mine.py") -> str:
        (tmp_path / file).write_text(text, encoding="utf-8")
        return f"{tmp_path / file}:{function}"

    return make


def loss_with(name: str, **settings: object) -> PolicyLoss:
    return build_loss(Config(policy_loss=name, **settings).algorithm)


def refusal_of(load, *args: object, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*args, **settings)
    return str(caught.value)


def test_a_name_with_a_colon_is_a_file_and_a_function() -> None:
    assert is_plugin("mine.py:terms")
    assert not is_plugin("clip")


def test_an_estimator_of_the_users_own_gets_the_rewards_of_a_group(write) -> None:
    name = write("def best(rewards):\n    return rewards - rewards.max()\n", "best")
    estimator = load_estimator(name)
    found = group_advantages(np.array([1.0, 3.0, 9.0]), np.array([True, True, False]), estimator=estimator)
    assert found.tolist() == [-2.0, 0.0, 0.0]
    assert load_estimator("leave_one_out") is leave_one_out


def test_a_policy_loss_of_the_users_own_is_evaluated_with_the_other_parts_around_it(write) -> None:
    loss = loss_with(write(REINFORCE), kl_coeff=0, kl_place="none", entropy_coeff=0.1)
    samples = random_samples((2, 3))
    batch = lay_out(samples, seed=1)
    value, _, gradients = evaluate(loss, batch.arrays)
    expected = sum(float((s.loss_weights * (-s.advantages * s.logprobs - 0.1 * s.entropy)).sum()) for s in samples)
    assert value == pytest.approx(expected, rel=1e-12)
    for got, sample in zip(batch.per_sample(gradients["logprobs"]), samples, strict=True):
        assert got.tolist() == pytest.approx((-sample.loss_weights * sample.advantages).tolist(), rel=1e-12)


READS = "def terms(logprobs, old, advantages, arrays):\n    [arrays[name] for name in {}]\n    return logprobs\n"


def test_a_policy_loss_may_use_the_arrays_that_every_micro_batch_has(write) -> None:
    names = "loss_mask loss_weights sample_index sources token_ids policy_version temperature trainer_version"
    name = write(READS.format([*names.split(), "rollout_logprobs", "advantages"]))
    assert loss_with(name).terms_fn is not None
    of_reference = write(READS.format(["ref_logprobs"]), file="reference.py")
    assert loss_with(of_reference, kl_coeff=0.1, kl_place="loss").terms_fn is not None


@pytest.mark.parametrize("array", ["position_ids", "old_logprobs", "ref_logprobs"])
def test_a_policy_loss_that_uses_an_array_which_is_not_there_is_refused_at_once(write, array: str) -> None:
    message = refusal_of(lambda name: loss_with(name, kl_coeff=0, kl_place="none"), write(READS.format([array])))
    assert f"fails on three tokens: KeyError: '{array}'" in message


def test_a_file_is_run_once_in_a_process_and_an_import_of_another_name_is_another_module(write, tmp_path) -> None:
    first = write("calls = []\ncalls.append(1)\ndef f(): return calls\ndef g(): return calls\n", "f")
    assert load_function(first, flag="--x")() is load_function(first[:-1] + "g", flag="--x")()
    second = write("def f(): return 2\n", "f", file="other.py")
    assert load_function(second, flag="--x")() == 2


def test_a_relative_path_is_from_here_and_becomes_absolute_in_the_config(write, tmp_path, monkeypatch) -> None:
    write(REINFORCE)
    monkeypatch.chdir(tmp_path)
    config = Config(policy_loss="mine.py:terms", advantage_estimator="mine.py:terms")
    assert config.algorithm.policy_loss == config.algorithm.advantage_estimator == f"{tmp_path}/mine.py:terms"
    monkeypatch.chdir("/")
    assert build_loss(config.algorithm).terms_fn is not None


LOADERS = [(load_estimator, "--advantage-estimator"), (load_terms, "--policy-loss")]


@pytest.mark.parametrize(("load", "flag"), LOADERS)
def test_a_missing_file_is_refused(load, flag: str, tmp_path: Path) -> None:
    name = f"{tmp_path}/none.py:terms"
    assert refusal_of(load, name) == f"{flag} {name}: there is no file {tmp_path}/none.py; write FILE.py:FUNCTION"
    assert refusal_of(load, f"{tmp_path}:terms").startswith(f"{flag} {tmp_path}:terms: there is no file")
    assert refusal_of(load, ":terms").startswith(f"{flag} :terms: there is no file")


@pytest.mark.parametrize(("load", "flag"), LOADERS)
@pytest.mark.parametrize("function", ["missing", "number", ""])
def test_a_missing_function_is_refused(load, flag: str, function: str, write, tmp_path: Path) -> None:
    name = write("number = 3\n", function)
    assert refusal_of(load, name) == f"{flag} {name}: {tmp_path}/mine.py has no function {function!r}"


@pytest.mark.parametrize(("load", "flag"), LOADERS)
@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f(:\n", "SyntaxError"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_with_its_cause(
    load, flag: str, text: str, cause: str, write
) -> None:
    name = write(text, "f")
    for _ in range(2):  # again: nothing half-imported is left
        message = refusal_of(load, name)
        assert message.startswith(f"{flag} {name}: ")
        assert "fails on import" in message
        assert cause in message
    assert not [module for module in sys.modules.values() if getattr(module, "__file__", None) == name[:-2]]


@pytest.mark.parametrize(("load", "flag"), LOADERS)
def test_a_file_that_is_no_python_is_refused(load, flag: str, write) -> None:
    name = write("hello", "f", file="mine.txt")
    assert refusal_of(load, name).startswith(f"{flag} {name}: ")


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("return rewards[:1]", "one finite number per valid sample"),
        ("return rewards[None]", "one finite number per valid sample"),
        ("return rewards * float('nan')", "one finite number per valid sample"),
        ("return None", ""),
        ("return 'abc'", ""),
        ("raise KeyError('x')", "KeyError: 'x'"),
    ],
)
def test_an_estimator_that_gives_no_number_a_sample_is_refused(body: str, cause: str, write) -> None:
    name = write(f"def f(rewards):\n    {body}\n", "f")
    message = refusal_of(load_estimator, name)
    assert message.startswith(f"--advantage-estimator {name}: fails on rewards [1, 0]: ")
    assert cause in message


@pytest.mark.parametrize("signature", ["", "logprobs", "logprobs, old, advantages", "a, b, c, d, e", "*, logprobs"])
def test_a_policy_loss_with_other_arguments_is_refused(signature: str, write) -> None:
    name = write(f"def terms({signature}):\n    pass\n")
    message = refusal_of(loss_with, name)
    assert message.startswith(f"--policy-loss {name}: is called with (logprobs, old_logprobs, advantages, micro_batch)")


@pytest.mark.parametrize(
    ("expression", "cause"),
    [
        ("logprobs.sum()", "policy terms have shape (), tokens (1, 3)"),
        ("logprobs[:, 1:]", "policy terms have shape (1, 2), tokens (1, 3)"),
        ("None", "AttributeError"),
        ("arrays['rewards']", "KeyError: 'rewards'"),
        ("logprobs * float('nan')", "finite"),
        ("(logprobs - old).abs().sqrt()", "finite"),  # its slope at 0
    ],
)
def test_a_policy_loss_that_fails_on_two_tokens_is_refused(expression: str, cause: str, write) -> None:
    name = write(f"def terms(logprobs, old, advantages, arrays):\n    return {expression}\n")
    message = refusal_of(loss_with, name)
    assert message.startswith(f"--policy-loss {name}: ")
    assert cause in message


@pytest.mark.parametrize("settings", [{"kl_coeff": 0, "kl_place": "none"}, {}], ids=["alone", "with KL in the loss"])
@pytest.mark.parametrize("expression", ["advantages * 1", "-advantages * logprobs.detach()", "old"])
def test_a_policy_loss_without_gradient_is_refused_whatever_else_has_one(
    expression: str, settings: dict[str, object], write
) -> None:
    name = write(f"def terms(logprobs, old, advantages, arrays):\n    return {expression}\n")
    message = refusal_of(loss_with, name, **settings)
    assert message.startswith(f"--policy-loss {name}: ")


def test_what_a_built_in_name_builds_has_no_function_of_the_users(write) -> None:
    for name in ("clip", "cispo"):
        loss = loss_with(name)
        assert loss.terms_fn is None
        assert loss.policy_loss == name


def test_trying_a_policy_loss_out_leaves_the_random_numbers_alone(write) -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    loss_with(write(REINFORCE))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("body", ["import sys\nsys.exit(0)\n", "raise SystemExit('enough')\n"])
def test_a_file_that_leaves_the_program_is_refused_and_does_not(body: str, write) -> None:
    name = write(body)
    assert "fails on import: SystemExit" in refusal_of(load_function, name, flag="--policy-loss")


def test_the_home_of_a_user_that_does_not_exist_is_refused_by_its_flag() -> None:
    for flag, value in (("--policy-loss", "~nobody-here/mine.py:terms"), ("--algo", "~nobody-here/mine.yaml")):
        message = refusal_of(parse, [flag, value])
        assert value.partition(":")[0] in message and "home directory" in message


@pytest.mark.filterwarnings("ignore:divide by zero")  # of what is refused
@pytest.mark.parametrize(("body", "rewards"), [("rewards / rewards.std()", "[1, 1]"), ("rewards - rewards[1]", "[1]")])
def test_an_estimator_that_fails_on_equal_rewards_or_a_single_one_is_refused(body: str, rewards: str, write) -> None:
    name = write(f"def mine(rewards):\n    return {body}\n", "mine")
    assert f"fails on rewards {rewards}" in refusal_of(load_estimator, name)


def test_a_policy_loss_that_wrongly_says_it_is_separable_is_refused(write) -> None:
    text = (
        "def terms(logprobs, old, advantages, arrays):\n"
        "    return -(logprobs - old).mean().exp() * advantages\n"
        "terms.is_token_separable = True\n"
    )
    assert "has is_token_separable" in refusal_of(loss_with, write(text))


def test_separable_terms_do_not_make_a_sequence_mask_separable(write) -> None:
    name = write(REINFORCE + "terms.is_token_separable = True\n")
    assert loss_with(name).is_token_separable
    assert loss_with(name, off_policy_correction="tis").is_token_separable
    assert not loss_with(name, off_policy_correction="sequence_mask").is_token_separable
