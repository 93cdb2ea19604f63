"""Test the way from a run's rollouts through a job on them to the critic of another run."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from coati_rl.errors import ConfigError
from tests.unit.loops.offline_run import run_offline, write_rows
from tests.unit.loops.test_episodes import TALK

JOB = {"device": "cpu", "train_batch_size": 8, "train_microbatch_size": 4, "learning_rate": 1e-2}
CRITIC = ("explained_variance", "value_mean", "return_mean", "value_loss")


@pytest.fixture(scope="module")
def sampled(run_in_threads):
    return run_in_threads({"kl_coeff": 0.0, "max_steps": 4, "learning_rate": 1e-9})


@pytest.fixture(scope="module")
def trained(sampled, model_dir, tmp_path_factory):
    """A job of 32 epochs on the 16 answers of that run."""
    rollouts, run_dir = str(sampled.paths.rollouts), str(tmp_path_factory.mktemp("value") / "run")
    own = {"model": str(model_dir), "dataset": rollouts, "eval_dataset": rollouts, "run_dir": run_dir}
    return run_offline("value", {**JOB, **own, "max_epochs": 32})


@pytest.mark.full
def test_it_begins_at_0_explains_the_returns_and_writes_a_classifier_of_transformers(sampled, trained) -> None:
    first, last = (trained.of("evaluation")[place]["metrics"] for place in (0, -1))
    assert (first["value_mean"], first["explained_variance"]) == (0.0, pytest.approx(0.0, abs=1e-9))
    assert last["explained_variance"] > 0.8 and last["loss"] < 0.2 * first["loss"]
    rewards, tokens = zip(*((line["reward"], line["num_tokens"]) for line in lines_of(sampled)), strict=True)
    assert last["loss_tokens"] == sum(tokens)
    # The one reward of an answer, at its end, is the return of each of its tokens.
    of_tokens = sum(reward * num for reward, num in zip(rewards, tokens, strict=True)) / sum(tokens)
    assert last["return_mean"] == pytest.approx(of_tokens)
    _, report = AutoModelForSequenceClassification.from_pretrained(checkpoint(trained), output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


@pytest.mark.full
def test_a_run_takes_it_as_its_critic_which_explains_the_first_step(run_in_threads, trained) -> None:
    ppo = {"algo": "PPO", "kl_coeff": 0.0, "gae_lambda": 1.0, "max_steps": 1, "value_clip": None}
    fresh, begun = (run_in_threads(ppo | {"critic_model": each}).steps[0] for each in (None, str(checkpoint(trained))))
    assert begun["reward_mean"] == fresh["reward_mean"], "the same answers"
    assert fresh["explained_variance"] == pytest.approx(0.0, abs=1e-9)
    assert begun["explained_variance"] > 0.6
    assert begun["value_loss"] < 0.5 * fresh["value_loss"]


def test_rewards_of_turns_are_at_their_tokens(run_in_threads, model_dir, tmp_path) -> None:
    episodes = run_in_threads({**TALK, "max_steps": 2})
    own = {"model": str(model_dir), "dataset": str(episodes.paths.rollouts), "run_dir": str(tmp_path / "run")}
    trace = run_offline("value", {**JOB, **own})
    lines = lines_of(episodes)
    returns = [value for line in lines for value in returns_of(line)]
    (step,) = trace.of("step")
    assert step["loss_tokens"] == len(returns) == sum(line["num_tokens"] for line in lines)
    assert step["return_mean"] == pytest.approx(sum(returns) / len(returns))
    assert len({*returns}) > 2


def returns_of(line):
    """Of each sampled token of a line: what its turn and later ones were given, which is the whole reward here."""
    assert line["reward"] == sum(value for _, _, value in line["token_rewards"])
    for start, end, _ in line["turns"]:
        yield from [sum(value for place, _, value in line["token_rewards"] if place >= start)] * (end - start)


@pytest.mark.full
def test_a_classifier_of_tokens_goes_on_as_one(run_in_threads, sampled, model_dir, tmp_path) -> None:
    start = tmp_path / "start"
    shutil.copytree(model_dir, start)
    model = AutoModelForTokenClassification.from_pretrained(model_dir, num_labels=1)
    torch.nn.init.zeros_(model.score.weight)
    torch.nn.init.constant_(model.score.bias, 0.25)
    model.save_pretrained(start)
    rollouts = str(sampled.paths.rollouts)
    own = {"model": str(start), "dataset": rollouts, "eval_dataset": rollouts, "run_dir": str(tmp_path / "value")}
    trace = run_offline("value", {**JOB, **own})
    assert trace.of("evaluation")[0]["metrics"]["value_mean"] == 0.25
    saved = AutoModelForTokenClassification.from_pretrained(checkpoint(trace))
    assert saved.score.bias.item() != 0.25
    ppo = {"algo": "PPO", "kl_coeff": 0.0, "critic_model": str(checkpoint(trace)), "max_steps": 1, "save_interval": 1}
    after = run_in_threads(ppo).paths.checkpoints / "step-1" / "value"
    critic, report = AutoModelForTokenClassification.from_pretrained(after, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert critic.score.bias.item() != saved.score.bias.item()


def test_a_run_s_other_files_and_other_tokens_are_refused(sampled, model_dir, tmp_path) -> None:
    own = {"model": str(model_dir), "run_dir": str(tmp_path / "run")}
    metrics = write_rows(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 0.5}])
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 1: has no uid, .* and is no line of rollouts"):
        run_offline("value", {**JOB, **own, "dataset": metrics})
    line = lines_of(sampled)[0]
    unknown = write_rows(tmp_path / "unknown.jsonl", [line | {"prompt_token_ids": [1, 272]}])
    with pytest.raises(
        ConfigError, match=r"--dataset: row-0 \(from 0\) has the token 272, and --model .* of 272 tokens"
    ):
        run_offline("value", {**JOB, **own, "dataset": unknown})


def lines_of(trace):
    return [json.loads(line) for path in trace.paths.rollouts.iterdir() for line in path.read_text().split("\n")[:-1]]


def checkpoint(trace):
    (last,) = (trace.run_dir / "checkpoints").glob("step-*")
    return last
