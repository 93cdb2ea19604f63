"""Test the merge of all actors' timelines into one trace, by the rules of the Trace Event Format."""

import json
import os

import pytest

from coati_rl.errors import RunError
from coati_rl.observability.timeline import Timeline
from coati_rl.observability.trace_file import merged_at_exit, write_trace
from tests.unit.observability.trace_format import check_format

START = 1_700_000_000_000_000_000  # ns


def line(phase, name, begin_ns=0, end_ns=None, *, track="main", number=0, **args):
    times = {"begin_ns": START + begin_ns, "end_ns": START + (begin_ns if end_ns is None else end_ns)}
    return json.dumps({"ph": phase, "name": name, "track": track, "number": number, "args": args} | times) + "\n"


def write(run_dir, actor, *lines):
    (run_dir / "timeline").mkdir(exist_ok=True)
    path = run_dir / "timeline" / f"{actor}.jsonl"
    path.write_text("".join(lines))
    return path


def merged(run_dir):
    path = write_trace(run_dir)
    assert path == run_dir / "timeline.json"
    return json.loads(path.read_text())["traceEvents"]


def spans(trace):
    return [(e["name"], e["ts"] - START // 1000, e["dur"]) for e in trace if e["ph"] == "X"]


def test_every_actor_is_a_process_and_every_track_a_thread(tmp_path):
    write(tmp_path, "producer-10", line("X", "wait", 0, 5000, track="thread 3"), line("X", "wait", track="thread 12"))
    write(tmp_path, "producer-2", line("X", "generate", 0, 5000, track="", number=1), line("i", "version", 9000))
    write(tmp_path, "coordinator", line("X", "assemble", 0, 1000))
    write(tmp_path, "trainer-0", line("X", "train", 0, 1000), line("X", "weights", 0, 1, track="thread 2"))
    trace = merged(tmp_path)
    check_format(trace)
    processes = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert processes == {1: "trainer-0", 2: "producer-2", 3: "producer-10", 4: "coordinator"}
    threads = [(processes[e["pid"]], e["args"]["name"]) for e in trace if e["name"] == "thread_name"]
    assert threads == [
        ("trainer-0", "main"),
        ("trainer-0", "thread 2"),
        ("producer-2", "main"),
        ("producer-10", "main"),
        ("producer-10", "thread 3"),
        ("producer-10", "thread 12"),
        ("coordinator", "main"),
    ]


def test_times_are_whole_microseconds_and_events_are_sorted(tmp_path):
    # A span is written when it ends: the outer one after the inner one.
    write(tmp_path, "trainer-0", line("X", "score", 1500, 3999), line("X", "train", 1500, 4999, step=2))
    trace = merged(tmp_path)
    check_format(trace)
    assert spans(trace) == [("train", 1, 3), ("score", 1, 2)]
    assert trace[-2]["args"] == {"step": 2}


def test_spans_that_overlap_are_pairs_with_an_id_of_their_own_in_the_whole_trace(tmp_path):
    for actor in ("producer-0", "producer-1"):  # each counts from 1
        first, second = line("B", "score", 0, number=1), line("X", "score", 500, 7000, number=2)
        write(tmp_path, actor, first, second, line("X", "score", 0, 6000, number=1, uid="a"))
    trace = merged(tmp_path)
    check_format(trace)
    pairs = [(e["pid"], e["ph"], e["ts"] - START // 1000) for e in trace if e["ph"] in ("b", "e")]
    assert pairs == [(pid, *event) for pid in (1, 2) for event in (("b", 0), ("e", 6), ("b", 0), ("e", 7))]
    assert len({e["id"] for e in trace if e["ph"] == "b"}) == 4
    assert [e["args"] for e in trace if e["ph"] == "b"] == [{"uid": "a"}, {}] * 2


def test_what_real_timelines_hold_keeps_the_format(tmp_path):
    trainer, producer = (Timeline(tmp_path / "timeline", actor) for actor in ("trainer-0", "producer-0"))
    for step in range(20):
        rows = [producer.start("generate", uid=f"train-{step}.{i}") for i in range(3)]
        with trainer.span("train", step=step):
            for name in ("score", "forward_backward", "optimizer step"):
                with trainer.span(name):
                    rows.pop().end()
        trainer.instant("policy version", version=step)
    for timeline in (trainer, producer):
        timeline.close()
    trace = merged(tmp_path)
    check_format(trace)
    assert len([event for event in trace if event["ph"] in ("X", "i", "b")]) == 20 * (3 + 4 + 1)


def test_a_torn_line_of_a_killed_process_is_left_out(tmp_path):
    whole, torn = line("X", "train", 0, 1000), line("X", "train", 2000, 3000)
    write(tmp_path, "trainer-0", whole, torn[:-20])
    write(tmp_path, "producer-0", whole, '{"ph":"X"}\n', "[1]\n", line("X", "no end before its begin", 5000, 4000))
    trace = merged(tmp_path)
    check_format(trace)
    assert spans(trace) == [("train", 0, 1), ("train", 0, 1)]


def test_what_a_process_was_doing_when_it_died_lasts_until_its_last_sign_of_life(tmp_path):
    path = write(tmp_path, "trainer-0", line("X", "train", 0, 1000), line("B", "wait for rollouts", 1000))
    os.utime(path, ns=(START, START + 60_000_000_000))
    trace = merged(tmp_path)
    check_format(trace)
    assert spans(trace) == [("train", 0, 1), ("wait for rollouts", 1, 59_999_999)]
    assert trace[-1]["args"] == {"unfinished": True}


def test_a_span_that_was_announced_and_has_ended_is_one_span(tmp_path):
    write(tmp_path, "trainer-0", line("B", "wait for rollouts", 1000), line("X", "wait for rollouts", 1000, 9000))
    assert spans(merged(tmp_path)) == [("wait for rollouts", 1, 8)]


def test_a_resumed_run_goes_on_in_the_files_of_the_one_that_was_killed(tmp_path):
    (tmp_path / "timeline").mkdir()
    (tmp_path / "timeline" / "trainer-0.jsonl").write_text(
        line("process", "") + line("X", "train", 0, 4000) + line("B", "save", 3000) + line("X", "train", 5000)[:40]
    )
    timeline = Timeline(tmp_path / "timeline", "trainer-0")
    with timeline.span("train"):
        pass
    timeline.close()
    trace = merged(tmp_path)
    check_format(trace)
    assert [(e["name"], e["args"]) for e in trace if e["ph"] == "X"] == [
        ("train", {}),
        ("save", {"unfinished": True}),
        ("train", {}),
    ]
    assert spans(trace)[:2] == [("train", 0, 4), ("save", 3, 1)]


def test_not_a_number_does_not_spoil_the_file(tmp_path):
    write(tmp_path, "trainer-0", line("i", "step", 0, loss=float("nan")))
    assert merged(tmp_path)[-1]["args"] == {"loss": "NaN"}
    assert "NaN," not in (tmp_path / "timeline.json").read_text()


def test_without_timelines_there_is_no_trace(tmp_path):
    assert write_trace(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_the_trace_is_written_when_a_run_fails(tmp_path):
    write(tmp_path, "trainer-0", line("X", "train", 0, 1000))
    try:
        with merged_at_exit(tmp_path):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert spans(json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]) == [("train", 0, 1)]


def test_a_trace_that_cannot_be_written_fails_a_run_and_does_not_hide_why_one_has_failed(tmp_path):
    write(tmp_path, "trainer-0", line("X", "train", 0, 1000))
    (tmp_path / ".timeline.json.partial").symlink_to("/dev/full")
    full = r"timeline.json cannot be written: No space left on device; free space there"
    with pytest.raises(RunError, match=full), merged_at_exit(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["timeline"], "half a trace takes no space"
    (tmp_path / ".timeline.json.partial").symlink_to("/dev/full")
    with pytest.raises(KeyboardInterrupt), merged_at_exit(tmp_path):
        raise KeyboardInterrupt
