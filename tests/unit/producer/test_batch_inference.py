"""Test batch inference with the fake engine: order, seeds, interruption, failed prompts, stalls."""

import json
from concurrent.futures import Future

import pytest

from coati_rl.coordinator.leases import LeaseTable, SamplingPlan
from coati_rl.errors import EngineError, RunError
from coati_rl.types import Prompt, SamplingParams, Score
from producer.batch.batch_inference import BatchJob, run_batch
from producer.batch.coordinator import BatchCoordinator
from producer.batch.output import BatchOutput
from producer.batch.rows import Selection
from producer.batch.unscored import Unscored
from producer.engines.fake_engine import FakeEngine

SAMPLING = SamplingParams(max_new_tokens=12)


class Lengths:
    """Score a response by its number of words; a pause before the scores of the first prompt changes the order."""

    def __init__(self):
        self.held = None

    def submit(self, responses, problem):
        future = Future()
        scores = [
            Score(reward=float(len(text.split())), answer_correct=True, format_valid=True, verdict="ok")
            for text in responses
        ]
        if problem.uid == "p0" and self.held is None:
            self.held = future, scores
        else:
            future.set_result(scores)
            if self.held and not self.held[0].done():
                self.held[0].set_result(self.held[1])
        return future

    def close(self):
        pass


class Dying:
    """The fake engine, which has ended before request `at`."""

    def __init__(self, engine, at):
        self.engine, self.at, self.num_requests = engine, at, 0

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def submit(self, request, on_tokens=None):
        self.num_requests += 1
        if self.num_requests > self.at:
            raise EngineError("the engine died")
        return self.engine.submit(request)


class Silent(Dying):
    """An engine that never answers."""

    def submit(self, request, on_tokens=None):
        return Future()


@pytest.fixture
def engine():
    made = FakeEngine(vocab_size=50, eos_token_id=0, max_model_len=40)
    made.wait_ready(10)
    yield made
    made.close()


@pytest.fixture
def run(tmp_path, engine):
    """Run a job over six prompts; those of `too_long` are refused by the engine. Returns: its figures."""

    def command(name="rows.jsonl", *, too_long=(), max_sequences=6, wrap=lambda engine: engine, reward=None, **changes):
        prompts = [
            Prompt(uid=f"p{n}", token_ids=(1, n + 2) * (25 if n in too_long else 1), ground_truth="", text=f"q{n}")
            for n in range(6)
        ]
        plan = SamplingPlan(group_size=3, sampling=SAMPLING)
        job = {"selection": Selection(), "max_failure_rate": 0.5, "stall_timeout_s": 30.0, **changes}
        job = BatchJob(
            prompts=prompts,
            leases=LeaseTable({"train": plan}, seed=0),
            group_size=3,
            max_sequences=max_sequences,
            **job,
        )
        with BatchOutput(tmp_path / name, {}) as output:
            return run_batch(job, output, wrap(engine), reward or Lengths())

    return command


def lines(tmp_path, name="rows.jsonl"):
    return [json.loads(line) for line in (tmp_path / name).read_text().split("\n")[:-1]]


def test_rows_are_in_the_order_of_the_prompts_with_all_samples(run, tmp_path):
    figures = run()
    rows = lines(tmp_path)
    assert [(row["uid"], row["sample"]) for row in rows] == [(f"p{n}", sample) for n in range(6) for sample in range(3)]
    assert [row["reward"] for row in rows] == [len(row["response"].split()) for row in rows]
    assert len({row["response"] for row in rows}) == 18, "every sample has a seed of its own"
    assert (figures["num_prompts"], figures["num_rows"], figures["num_failed"]) == (6, 18, 0)
    assert figures["reward_mean"] == pytest.approx(sum(row["reward"] for row in rows) / 18)


def test_the_rows_do_not_depend_on_how_many_are_in_flight(run, tmp_path):
    run("a.jsonl", max_sequences=3)
    run("b.jsonl", max_sequences=18)
    assert lines(tmp_path, "a.jsonl") == lines(tmp_path, "b.jsonl")


def test_an_interrupted_command_goes_on_and_ends_with_the_same_file(run, tmp_path):
    whole = run("whole.jsonl")
    with pytest.raises(EngineError, match="the engine died"):
        run(wrap=lambda engine: Dying(engine, at=4), max_sequences=3)
    written = lines(tmp_path)
    assert 0 < len(written) < 18
    assert run() == whole
    assert (tmp_path / "rows.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert run() == whole, "with nothing left to do"


def test_a_prompt_that_the_engine_refuses_is_counted_and_has_no_rows(run, tmp_path):
    figures = run(too_long={1})
    assert "p1" not in {row["uid"] for row in lines(tmp_path)}
    assert (figures["num_failed"], figures["num_samples"], figures["num_prompts"]) == (1, 15, 6)
    assert figures["accuracy"] == pytest.approx(15 / 18)
    (record,) = [each for each in lines(tmp_path, "rows.jsonl.progress")[1:] if "error" in each]
    assert record["uid"] == "p1" and "40" in record["error"]


def test_too_many_failures_end_it_with_the_cause(run):
    with pytest.raises(RunError, match=r"2 prompts failed, and --max-failure-rate 0.2 allows 1 of 6; the last one: p4"):
        run(too_long={1, 4}, max_failure_rate=0.2)
    with pytest.raises(RunError, match=r"2 prompts failed, and --max-failure-rate 0.2 allows 1 of 6"):
        run(too_long={1, 4}, max_failure_rate=0.2)  # repeated, it goes on behind the last of them
    assert run(too_long={1, 4}, max_failure_rate=0.4)["num_failed"] == 2


def test_an_engine_that_never_answers_ends_it(run):
    with pytest.raises(RunError, match=r"no prompt was finished for 0.3 s \(--stall-timeout-s\)"):
        run(wrap=lambda engine: Silent(engine, 0), stall_timeout_s=0.3)


def test_without_rewards_samples_are_written_without_scores(run, tmp_path):
    figures = run(reward=Unscored(), selection=Selection(is_scored=False))
    assert all("reward" not in row for row in lines(tmp_path)) and len(lines(tmp_path)) == 18
    assert "accuracy" not in figures


def test_a_slow_first_prompt_does_not_let_the_others_run_ahead_without_bound():
    prompts = [Prompt(uid=f"p{n}", token_ids=(1,), ground_truth="") for n in range(50)]
    leases = LeaseTable({"train": SamplingPlan(group_size=1, sampling=SAMPLING)}, seed=0)
    written = []
    coordinator = BatchCoordinator(prompts, leases, lambda *outcome: written.append(outcome), max_in_flight=2)
    first, *others = coordinator.lease(0, max_prompts=50, timeout_s=0.0).leases
    assert len(others) == 7, "four times those in flight"
    for lease in others:
        coordinator.fail(0, lease.lease_id, "later")
    assert written == [] and coordinator.lease(0, max_prompts=50, timeout_s=0.0).leases == ()
    coordinator.fail(0, first.lease_id, "first")
    assert [(prompt.uid, cause) for prompt, cause in written] == [("p0", "first")] + [
        (f"p{n}", "later") for n in range(1, 8)
    ]
    (lease,) = coordinator.lease(0, max_prompts=1, timeout_s=0.0).leases
    assert lease.prompt.uid == "p8"
