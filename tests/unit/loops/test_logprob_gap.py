"""Test the limit of the engine-trainer mismatch in whole runs on a real model's log-probabilities.

The part of a test's name before two underscores is the field (see test_flags.py).
"""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from coati_rl.errors import RunError
from coati_rl.work import SyncWork, TrainWork

REAL = {"backend": "transformers"}
# Two prompts a step, with eight samples of at most 32 tokens.
BF16 = {**REAL, "precision": "bf16", "num_generations": 8, "max_new_tokens": 32, "train_microbatch_size": 8}
LAYOUTS = [
    {},
    {"num_inferencer": 2, "n_behind": 1},
    {"inference_batch_size": 2, "one_sample_per_row": True},
    {"inflight_update": True, "n_behind": 1, "temperature": 0.7},
]
WRONG = [(0.02, -0.02), (0.02, 0.02), (-0.02, -0.02)]  # nats, on a response's tokens in turn


@pytest.fixture(scope="module")
def cool(run_in_threads):
    return run_in_threads({**REAL, "temperature": 0.7, "max_logprob_gap": 100.0})


def test_every_sync_is_proved_by_the_probe(cool):
    trace = cool
    assert [event["policy_version"] for event in trace.of("sync")] == [0, 2, 4]
    assert all(event["probe_gap_max"] <= 1e-4 for event in trace.of("sync"))
    assert all(work.probe for work in trace.work if isinstance(work, SyncWork))


@pytest.mark.full
@pytest.mark.parametrize("in_flight", [False, True])
def test_an_in_flight_update_is_proved_likewise(run_in_threads, in_flight):
    trace = run_in_threads({**REAL, "inflight_update": in_flight, "n_behind": 1})
    assert all(event["probe_gap_max"] <= 1e-4 for event in trace.of("sync"))
    assert max(record["staleness_max"] for record in trace.steps) <= 1


@pytest.mark.parametrize(
    ("n_behind", "in_flight"), [(2, True), *(pytest.param(ahead, False, marks=pytest.mark.full) for ahead in (0, 1))]
)
def test_sampled_tokens_are_measured_at_every_step_with_the_weights_that_sampled_them(
    run_in_threads, n_behind, in_flight
):
    # K = 2. At this learning rate one version of the weights is 0.1 nats from the next.
    fields = {"n_behind": n_behind, "inflight_update": in_flight, "num_episodes": 2, "learning_rate": 1e-2}
    trace = run_in_threads({**REAL, **fields}, hold_trainer=True)
    assert all(event["probe_gap_max"] <= 1e-4 for event in trace.of("sync"))
    assert max(record["staleness_max"] for record in trace.steps) == n_behind
    assert all(0 <= record["logprob_gap_max"] < 1e-5 for record in trace.steps)
    assert all(record["logprob_gap_tokens"] >= 1 for record in trace.steps)


@pytest.mark.full
def test_logprob_gap_tokens__of_none_are_measured_where_earlier_weights_sampled(run_in_threads):
    trace = run_in_threads({**REAL, "logprob_gap_tokens": 0, "n_behind": 1}, hold_trainer=True)
    assert [record["logprob_gap_mean"] is None for record in trace.steps] == [False, True, True, True]
    trace = run_in_threads({**REAL, "logprob_gap_tokens": 1, "n_behind": 1}, hold_trainer=True)
    assert [record["logprob_gap_mean"] is None for record in trace.steps] == [False] * 4


def test_max_logprob_gap__stops_a_run_whose_engine_samples_from_something_else(run_in_threads):
    with pytest.raises(
        RunError, match=r"in step 1 the log-probabilities of engine and trainer differ by .* nats .*another temperature"
    ):
        run_in_threads(REAL, logprob_scale=1.5)
    trace = run_in_threads({**REAL, "max_logprob_gap": 100.0, "max_steps": 1}, logprob_scale=1.5)
    assert len(trace.steps) == 1


@pytest.mark.full
def test_the_gate_sees_steps_all_of_whose_tokens_earlier_weights_sampled(run_in_threads):
    # K = 2 and 8 slots: what the second commit's weights sample is trained in steps 5 and 6, after the third sync.
    fields = {**REAL, "n_behind": 1, "num_episodes": 2}
    fault = {"hold_trainer": True, "logprob_scale": 1.5, "scales_after_commit": 1}
    assert len(run_in_threads({**fields, "logprob_gap_tokens": 0}, **fault).steps) == 8, "nobody looks"
    with pytest.raises(RunError, match=r"in step 5 the log-probabilities of engine and trainer differ by .* nats"):
        run_in_threads(fields, **fault)


@pytest.mark.full
def test_measuring_the_gap_changes_no_weight(run_in_threads):
    alone = {**REAL, "max_num_seqs": 2}  # a prompt's samples: bits that do not depend on what else has arrived
    runs = [run_in_threads({**alone, "logprob_gap_tokens": number}) for number in (0, 256)]
    assert [[step["logprob_gap_mean"] is None for step in run.steps] for run in runs] == [
        [False, True, False, True],
        [False, False, False, False],
    ]
    for name, weight in runs[0].weights.items():
        assert weight.equal(runs[1].weights[name])


@pytest.mark.full
def test_on_logprob_gap__corrects_from_the_next_step_on(run_in_threads):
    trace = run_in_threads({**REAL, "on_logprob_gap": "tis", "n_behind": 1}, logprob_scale=1.5)
    corrected = [work.is_corrected for work in trace.work if isinstance(work, TrainWork)]
    assert corrected[0] is False and corrected[-1] is True
    assert [record["correction_mean"] is not None for record in trace.steps] == corrected
    (gap,) = trace.of("gap")
    assert "the loss corrects for it from the next rollout step on" in gap["cause"]


def test_an_engine_that_stays_behind_is_found_by_its_answers(run_in_threads):
    with pytest.raises(RunError, match=r"producer-0: .* they are those of version 0 .*: stale weights"):
        run_in_threads({**REAL, "learning_rate": 1e-2}, forgets_to_commit=True)


def test_the_trainer_divides_logits_by_the_temperature_that_samples_were_drawn_at(cool):
    gaps = [record["logprob_gap_max"] for record in cool.steps]
    assert len(gaps) == 4
    assert max(gaps) < 1e-5  # 0.14 at a temperature of 1


@pytest.mark.full
def test_in_bfloat16_the_trainers_rounding_is_measured_on_the_first_steps_tokens(run_in_threads):
    trace = run_in_threads({**BF16, "n_behind": 1}, hold_trainer=True)
    assert all(0 < event["probe_gap_mean"] < 0.01 for event in trace.of("sync"))
    first = trace.steps[0]
    assert 0 < first["logprob_rounding_mean"] < first["logprob_rounding_rms"] < 0.01
    assert first["logprob_rounding_tokens"] >= 256
    assert abs(first["logprob_shift_mean"]) < first["logprob_rounding_mean"]
    assert all(step["logprob_gap_mean"] < 2 * first["logprob_rounding_mean"] for step in trace.steps)
    in_float32 = run_in_threads({**BF16, "precision": "fp32"}).steps
    assert {(step["logprob_rounding_mean"], step["logprob_rounding_tokens"]) for step in in_float32} == {(None, 0)}


@pytest.mark.full
@pytest.mark.parametrize("error", [WRONG[0], pytest.param(WRONG[1], marks=pytest.mark.full)])
def test_in_bfloat16_an_engine_that_is_off_by_two_hundredths_is_stopped_in_its_first_steps(run_in_threads, error):
    with pytest.raises(RunError, match=r"in step [12] .*the trainer's own rounding: 0\.00\d+.* on the same weights"):
        run_in_threads(BF16, logprob_error=error)


@pytest.fixture(scope="module")
def peaked_model(model_dir, tmp_path_factory):
    """A model whose rounding has heavy tails, as of trained ones: of most tokens it is sure."""
    directory = tmp_path_factory.mktemp("models") / "peaked"
    shutil.copytree(model_dir, directory)
    weights = load_file(directory / "model.safetensors")
    save_file(
        {name: weight * (1 if weight.dim() < 2 else 5) for name, weight in weights.items()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    return str(directory)


@pytest.mark.full
@pytest.mark.parametrize(
    ("seed", "precision"), [*((seed, "bf16") for seed in range(20)), *((seed, "fp32") for seed in range(4))]
)
def test_twenty_seeds_pass_with_an_honest_engine_and_none_with_one_that_is_off_by_two_hundredths(
    run_in_threads, peaked_model, seed, precision
):
    fields = {**BF16, "model": peaked_model, "precision": precision, "seed": seed, **LAYOUTS[seed % len(LAYOUTS)]}
    assert len(run_in_threads({**fields, "num_episodes": 5}).steps) == 20
    with pytest.raises(RunError, match=r"in step [1-4] the log-probabilities"):
        run_in_threads(fields, logprob_error=WRONG[seed % len(WRONG)])
