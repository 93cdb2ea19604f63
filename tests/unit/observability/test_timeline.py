"""Test the timeline of an actor: spans on tracks, written as they happen, whatever ends the process."""

import itertools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from coati_rl.observability import timeline as timeline_module
from coati_rl.observability.timeline import NO_TIMELINE, Timeline, now_ns


def events(path: Path) -> list[dict]:
    """Return the spans and instants of a timeline."""
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1] if line]
    return [line for line in lines if line["ph"] not in ("process", "C")]


def recorded(directory: Path, actor: str = "trainer-0") -> list[dict]:
    return events(directory / f"{actor}.jsonl")


def wait_until(is_true) -> None:
    deadline = time.monotonic() + 60.0
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_span_says_what_went_on_from_when_to_when(tmp_path):
    before_ns = time.time_ns()
    timeline = Timeline(tmp_path, "trainer-0")
    with timeline.span("train", step=3):
        time.sleep(0.01)
    timeline.close()
    (span,) = recorded(tmp_path)
    assert (span["ph"], span["name"], span["track"], span["args"]) == ("X", "train", "main", {"step": 3})
    assert span["end_ns"] - span["begin_ns"] >= 10_000_000
    # The anchor was read when the module was imported; the two clocks part by much less than a second meanwhile.
    assert before_ns - 1e9 < span["begin_ns"] < span["end_ns"] < time.time_ns() + 1e9


def test_spans_of_a_thread_nest_on_its_track(tmp_path):
    timeline = Timeline(tmp_path, "trainer-0")
    with timeline.span("train"), timeline.span("score"):
        pass
    timeline.close()
    inner, outer = recorded(tmp_path)
    assert (inner["name"], outer["name"]) == ("score", "train")
    assert inner["track"] == outer["track"] == "main"
    assert outer["begin_ns"] <= inner["begin_ns"] <= inner["end_ns"] <= outer["end_ns"]


def test_a_span_ends_when_the_block_raises(tmp_path):
    timeline = Timeline(tmp_path, "trainer-0")
    with pytest.raises(ValueError, match="seen"), timeline.span("train"):
        raise ValueError("seen")
    timeline.close()
    assert [span["name"] for span in recorded(tmp_path)] == ["train"]


def test_threads_have_tracks_of_their_own_and_lose_nothing(tmp_path):
    timeline = Timeline(tmp_path, "producer-0")
    with timeline.span("first"):
        pass
    together = threading.Barrier(4)

    def work():
        together.wait()
        for _ in range(500):
            with timeline.span("work"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    spans = recorded(tmp_path, "producer-0")
    tracks = [span["track"] for span in spans if span["ph"] == "X"]  # on a busy machine one may be announced first
    assert {track: tracks.count(track) for track in set(tracks)} == {
        "main": 1,
        **{f"thread {number}": 500 for number in (2, 3, 4, 5)},
    }


def test_what_overlaps_has_a_number_instead_of_a_track(tmp_path):
    timeline = Timeline(tmp_path, "producer-0")
    a, b = timeline.start("generate", uid="a"), timeline.start("generate", uid="b")
    a.end(tokens=7)
    score = timeline.start("score")
    for span in (b, score, b):  # to end twice is to end once
        span.end()
    timeline.close()
    assert [(span["track"], span["number"], span["args"]) for span in recorded(tmp_path, "producer-0")] == [
        ("", 1, {"uid": "a", "tokens": 7}),
        ("", 2, {"uid": "b"}),
        ("", 3, {}),
    ]


def test_an_instant_has_no_length_and_no_thread(tmp_path):
    timeline = Timeline(tmp_path, "trainer-0")
    with timeline.span("train"):
        pass
    thread = threading.Thread(target=timeline.instant, args=("sync committed",), kwargs={"version": 4})
    thread.start()
    thread.join()
    timeline.close()
    _, event = recorded(tmp_path)
    assert event["track"] == "main"
    assert (event["ph"], event["name"], event["args"]) == ("i", "sync committed", {"version": 4})
    assert event["begin_ns"] == event["end_ns"]


def test_a_killed_process_leaves_what_it_did_and_what_it_was_doing(tmp_path):
    program = f"""
import time
from pathlib import Path
from coati_rl.observability.timeline import Timeline
timeline = Timeline(Path({str(tmp_path)!r}), "trainer-0")
with timeline.span("train"):
    pass
timeline.span("wait for rollouts")
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[3])
    path = tmp_path / "trainer-0.jsonl"
    try:
        wait_until(lambda: path.is_file() and b"wait for rollouts" in path.read_bytes())
    finally:
        process.kill()
        process.wait(timeout=60.0)
    assert [(e["ph"], e["name"]) for e in recorded(tmp_path)] == [("X", "train"), ("B", "wait for rollouts")]
    assert path.stat().st_mtime_ns >= recorded(tmp_path)[1]["begin_ns"]


def test_a_full_file_says_so_once_and_how_much_is_missing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(timeline_module, "FLUSH_INTERVAL_S", 0.001)
    timeline = Timeline(tmp_path, "trainer-0", max_file_bytes=5_000)
    numbers = itertools.count()

    def tick() -> bool:
        timeline.instant("tick", number=next(numbers))
        return "only counted" in caplog.text

    wait_until(tick)
    size = (tmp_path / "trainer-0.jsonl").stat().st_size
    for _ in range(100):
        tick()
    timeline.span("not announced any more")
    time.sleep(0.01)
    timeline.close()
    ticks, (full, dropped) = recorded(tmp_path)[:-2], recorded(tmp_path)[-2:]
    assert [event["args"]["number"] for event in ticks] == list(range(len(ticks)))
    assert (full["name"], dropped["name"]) == ("timeline full", "events dropped")
    assert len(ticks) + dropped["args"]["number"] == next(numbers)
    assert 5_000 < size < (tmp_path / "trainer-0.jsonl").stat().st_size < size + 200
    assert len(caplog.records) == 1


def test_a_span_whose_begin_is_in_the_file_gets_its_end_however_full_the_file_is(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline_module, "FLUSH_INTERVAL_S", 0.01)
    path, timeline = tmp_path / "trainer-0.jsonl", Timeline(tmp_path, "trainer-0", max_file_bytes=200)
    with timeline.span("wait for rollouts"):
        wait_until(lambda: path.is_file() and "timeline full" in path.read_text())
    timeline.instant("tick")
    timeline.close()
    names = [(event["ph"], event["name"]) for event in recorded(tmp_path)]
    waited = "wait for rollouts"
    assert names == [("B", waited), ("i", "timeline full"), ("X", waited), ("i", "events dropped")]


def test_a_resumed_run_does_not_fill_a_file_that_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline_module, "FLUSH_INTERVAL_S", 0.01)
    path = tmp_path / "trainer-0.jsonl"
    for number in (1, 2):
        timeline = Timeline(tmp_path, "trainer-0", max_file_bytes=1)
        wait_until(lambda number=number: path.is_file() and path.read_text().count("timeline full") == number)
        timeline.instant("tick")
        timeline.close()
    assert [event["name"] for event in recorded(tmp_path)] == ["timeline full", "events dropped"] * 2


def test_memory_is_bounded_and_what_was_dropped_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline_module, "MAX_BUFFERED", 3)
    monkeypatch.setattr(timeline_module, "FLUSH_INTERVAL_S", 60.0)
    timeline = Timeline(tmp_path, "trainer-0")
    for _ in range(5):
        timeline.instant("tick")
    timeline.close()
    assert [event["name"] for event in recorded(tmp_path)] == ["tick", "tick", "tick", "events dropped"]
    assert recorded(tmp_path)[-1]["args"] == {"number": 2}


def test_a_disk_that_refuses_ends_the_timeline_and_not_the_run(tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "timeline").write_text("a file where the directory should be")
    timeline = Timeline(tmp_path / "timeline", "trainer-0")
    with timeline.span("train"):
        pass
    timeline.close()
    assert "the timeline ends here" in caplog.text


def test_a_full_disk_is_told_with_path_and_remedy(tmp_path):
    (tmp_path / "driver.jsonl").symlink_to("/dev/full")
    timeline = Timeline(tmp_path, "driver")
    timeline.instant("tick")
    timeline.close()
    assert timeline.problem.startswith(
        f"{tmp_path}/driver.jsonl cannot be written: No space left on device; free space"
    )


def test_an_actor_without_a_directory_records_nothing():
    with NO_TIMELINE.span("train"):
        NO_TIMELINE.instant("tick")
    NO_TIMELINE.start("generate").end()
    NO_TIMELINE.close()
    assert len(NO_TIMELINE._buffer) == len(NO_TIMELINE._open) == 0


def test_a_span_costs_microseconds(tmp_path):
    """5 us are allowed, and measured in docs/timeline.md; here, five times as much, for a machine that is busy."""
    timeline = Timeline(tmp_path, "trainer-0")
    best = []
    for _ in range(20):
        begin = time.perf_counter()
        for step in range(500):
            with timeline.span("train", step=step):
                pass
        best.append((time.perf_counter() - begin) / 500)
    timeline.close()
    assert min(best) < 25e-6


def test_time_does_not_go_back():
    times = [now_ns() for _ in range(1000)]
    assert times == sorted(times)
