"""Test what a run comes to: first, best and last figures, and minutes."""

from coati_rl.observability.records import events_in
from coati_rl.observability.run_summary import RunSummary


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def summary_of(*events, recalled=(), clock=None):
    summary = RunSummary(clock or Clock())
    for event in recalled:
        summary.recall(event)
    for event in events:
        summary.add(event)
    return summary


def step(number, reward, **fields):
    return {"event": "step", "step": number, "reward_mean": reward, "answer_accuracy": reward, "loss": 0.1, **fields}


def test_a_run_with_producers_shows_rewards_and_evaluations_and_a_step_without_a_valid_sample_nothing():
    evaluation = {"event": "evaluation", "task": "math", "num_prompts": 4, "reward_max": 1.0}
    summary = summary_of(
        {**evaluation, "step": 0, "accuracy": 0.25, "reward_mean": 0.5},
        step(1, 0.1),
        step(2, 0.7),
        step(3, 0.7),
        step(4, None),
        {**evaluation, "step": 4, "accuracy": 0.5, "reward_mean": 0.25},
    )
    assert summary.rows() == [
        ("eval/math/accuracy", "0.25", "0.5", "4", "0.5"),
        ("eval/math/reward_mean", "0.5", "0.5", "0", "0.25"),
        ("reward", "0.1", "0.7", "2", "0.7"),
        ("accuracy", "0.1", "0.7", "2", "0.7"),
    ]
    assert summary.last_step == 4


def test_rewards_of_1_and_0_are_shown_once():
    evaluation = {"event": "evaluation", "task": "math", "reward_max": 1.0}
    summary = summary_of(*({**evaluation, "step": n, "accuracy": n / 4, "reward_mean": n / 4} for n in (0, 2)))
    assert summary.rows() == [("eval/math/accuracy", "0", "0.5", "2", "0.5")]


def test_a_job_on_a_dataset_shows_losses_of_which_the_smallest_is_the_best():
    summary = summary_of(
        {"event": "evaluation", "step": 0, "task": "held", "metrics": {"loss": 2.0, "perplexity": 7.4}},
        {"event": "step", "step": 1, "loss": 1.5},
        {"event": "step", "step": 2, "loss": 1.75, "rewards/accuracies": 0.5},
        {"event": "evaluation", "step": 2, "task": "held", "metrics": {"loss": 1.25, "perplexity": 3.5}},
    )
    assert summary.rows() == [
        ("eval/held/loss", "2", "1.25", "2", "1.25"),
        ("loss", "1.5", "1.5", "1", "1.75"),
        ("accuracy", "0.5", "0.5", "2", "0.5"),
    ]


def test_the_minutes_of_all_phases_are_those_of_the_run():
    clock = Clock()
    summary = summary_of(clock=clock)
    clock.now = 60.0
    for number, waited in ((1, 30.0), (2, 0.0)):
        clock.now += 90.0
        summary.add(step(number, 0.5, rollout_wait_s=waited, train_s=45.0, sync_s=None))
    clock.now += 12.0
    # Started up at the first event, 150 s; 252 s in all, of which 30 s are waits and 90 s training.
    assert summary.minutes() == "minutes: 4.2 in all; starting 2.5, waiting for work 0.5, training 1.5, other 0.0"


def test_a_resumed_run_shows_the_figures_of_the_whole_run_and_the_minutes_of_its_own():
    summary = summary_of(step(2, 0.5), recalled=[step(1, 0.9, train_s=600.0)])
    assert summary.rows()[0] == ("reward", "0.9", "0.9", "1", "0.5")
    assert "training" not in summary.minutes()


def test_lines_are_aligned():
    evaluation = {
        "event": "evaluation",
        "step": 0,
        "task": "a-long-name-of-a-set",
        "accuracy": 0.5,
        "reward_mean": 0.25,
    }
    summary = summary_of(step(1, 0.1), step(12, 0.7), evaluation)
    first, second, *_, last, _ = summary.lines()
    assert first == "12 steps                               first  best  of step  last"
    assert second == "reward                                   0.1   0.7       12   0.7"
    assert last == "eval/a-long-name-of-a-set/reward_mean   0.25  0.25        0  0.25"


def test_a_summary_has_at_most_ten_lines_and_leaves_out_evaluations_beyond():
    evaluations = [{"event": "evaluation", "step": 0, "task": f"set-{n}", "accuracy": 0.5} for n in range(9)]
    closing = ["checkpoint: c", "serve it: s", "rollouts: r", "report: r"]
    lines = summary_of(*evaluations, step(3, 0.1)).lines(closing)
    names = [line.split("  ")[0] for line in lines]
    assert names[:5] == ["3 steps", "eval/set-0/accuracy", "eval/set-1/accuracy", "reward", "accuracy"]
    assert lines[5].startswith("minutes: ") and lines[6:] == closing and len(lines) == 10


def test_the_figures_before_a_resume_are_read_from_the_run_directory(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward_mean": 0.9}\n{"step": 2, "rewa')  # it was killed
    (tmp_path / "summary.jsonl").write_text('{"step": 0, "task": "math", "accuracy": 0.25}\n')
    events = list(events_in(tmp_path / "metrics.jsonl", tmp_path))
    assert [(event["event"], event["step"]) for event in events] == [("step", 1), ("evaluation", 0)]
    assert [row[:2] for row in summary_of(recalled=events).rows()] == [
        ("reward", "0.9"),
        ("eval/math/accuracy", "0.25"),
    ]
    assert list(events_in(tmp_path / "none", tmp_path / "none")) == []
