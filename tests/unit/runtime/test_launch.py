"""Which events become records, and where they go."""

from coati_rl.observability.metrics import METRIC_KEYS
from coati_rl.runtime.launch import _record


class Notes:
    """A sink and a display at once."""

    def __init__(self):
        self.written = []
        self.shown = []

    def write(self, step, record):
        self.written.append((step, record))

    def show(self, event):
        self.shown.append(event)


def recorded(event):
    """What metrics.jsonl, TensorBoard and syncs.jsonl get of an event."""
    display, jsonl, tensorboard, syncs = Notes(), Notes(), Notes(), Notes()
    _record(event, display, [jsonl, tensorboard], syncs)
    assert len(display.shown) == 1
    return jsonl.written, tensorboard.written, syncs.written


def test_a_step_is_one_record_with_all_keys_in_every_sink():
    jsonl, tensorboard, syncs = recorded({"event": "step", "step": 3, "loss": 0.5})
    assert jsonl == tensorboard
    assert syncs == []
    ((step, record),) = jsonl
    assert (step, record["loss"], record["kl_mean"]) == (3, 0.5, None)
    assert tuple(record) == METRIC_KEYS


def test_an_evaluation_is_a_curve_but_no_line_of_metrics_jsonl():
    jsonl, tensorboard, syncs = recorded({"event": "evaluation", "step": 4, "task": "math", "accuracy": 0.75})
    assert jsonl == syncs == []
    assert tensorboard == [(4, {"eval/math/accuracy": 0.75})]


def test_a_weight_sync_is_a_line_of_syncs_jsonl():
    details = {"producers": [0, 2], "seconds": 0.5, "digest": "a1"}
    details |= {"commit_s": 0.02, "probe_gap_mean": 1e-7, "probe_gap_max": 3e-7}
    jsonl, tensorboard, syncs = recorded({"event": "sync", "policy_version": 4, **details})
    assert jsonl == tensorboard == []
    assert syncs == [(4, {"step": 4, **details})]


def test_other_events_are_shown_only():
    assert recorded({"event": "checkpoint", "step": 4, "path": "p"}) == ([], [], [])
