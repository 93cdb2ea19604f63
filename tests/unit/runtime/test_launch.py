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
    display, jsonl, tensorboard = Notes(), Notes(), Notes()
    _record(event, display, [jsonl, tensorboard])
    assert len(display.shown) == 1
    return jsonl.written, tensorboard.written


def test_a_step_is_one_record_with_all_keys_in_every_sink():
    jsonl, tensorboard = recorded({"event": "step", "step": 3, "loss": 0.5})
    assert jsonl == tensorboard
    ((step, record),) = jsonl
    assert (step, record["loss"], record["kl_mean"]) == (3, 0.5, None)
    assert tuple(record) == METRIC_KEYS


def test_an_evaluation_is_a_curve_but_no_line_of_metrics_jsonl():
    jsonl, tensorboard = recorded({"event": "evaluation", "step": 4, "task": "math", "accuracy": 0.75})
    assert jsonl == []
    assert tensorboard == [(4, {"eval/math/accuracy": 0.75})]


def test_other_events_are_shown_only():
    assert recorded({"event": "checkpoint", "step": 4, "path": "p"}) == ([], [])
