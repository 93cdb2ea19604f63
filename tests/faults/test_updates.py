"""Weights that are not the model's: no producer serves them, and a run whose trainer goes on sending them ends."""

STEPS = 2


def test_a_spoiled_update_is_refused_by_name_and_the_sync_is_repeated(make_tiny, start_run, flags):
    spoiled = {"1": "missing layer", "2": "NaN", "4": "unknown name", "5": "wrong shape"}  # 0, 3 and 6 are whole
    run = start_run(*flags(make_tiny(tied=True)), "-b", "transformers", "--max-steps", STEPS, exports=spoiled)

    assert run.wait() == 0, run.text()

    log = run.log("trainer-0")
    for cause in (
        "version 1 is refused: model.layers.1.input_layernorm.weight is missing",
        "tensor 'model.norm.weight' holds NaN or infinity; nothing was committed",
        "version 2 is refused: model.norm.weight is missing; model.final_norm.weight is unknown",
        "version 2 is refused: model.norm.weight has shape (32,), the model's has (64,)",
    ):
        assert cause in log, log
    assert [record["step"] for record in run.records()] == [1, 2]
    assert any(record["grad_norm"] > 0 for record in run.records()), "else old weights would pass for new ones"
    syncs = run.syncs()
    assert [(sync["step"], sync["producers"]) for sync in syncs] == [(0, [0]), (1, [0]), (2, [0])]
    assert all(sync["probe_gap_max"] < 1e-4 for sync in syncs), "what serves is what the trainer holds"
    assert "lost" not in run.text()
    assert run.left_over() == []


def test_an_update_that_lacks_a_layer_every_time_ends_a_run_with_vllm_by_that_name(make_tiny, start_run, flags):
    spoiled = dict.fromkeys("123", "missing layer")
    run = start_run(*flags(make_tiny(tied=True)), "--max-steps", STEPS, exports=spoiled)

    assert run.wait() == 1, run.text()

    last = run.text().splitlines()[-1]
    assert "weight sync to version 1 failed 3 times" in last
    assert "producer 0" in last and "model.layers.1.input_layernorm.weight is missing" in last and "logs: " in last
    assert [sync["step"] for sync in run.syncs()] == [0]
    assert run.left_over() == []
