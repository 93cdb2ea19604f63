"""Test the sums of a timeline."""

import json

from coati_rl.report.time_parts import time_parts

SECOND = 1_000_000_000


def write(run, actor, *spans):
    (run / "timeline").mkdir(exist_ok=True)
    lines = [
        {
            "ph": phase,
            "name": name,
            "track": track,
            "number": number,
            "begin_ns": int(begin * SECOND),
            "end_ns": int(end * SECOND),
            "args": {},
        }
        for phase, name, track, number, begin, end in spans
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "timeline" / f"{actor}.jsonl").write_text(text + '{"ph": "X", "na')  # a killed run's last line


def test_spans_that_overlap_count_once_and_one_inside_another_is_a_part_of_it(tmp_path):
    write(
        tmp_path,
        "trainer-0",
        ("process", "", "main", 0, 100, 100),
        ("X", "train", "main", 0, 100, 106),
        ("X", "forward_backward", "main", 0, 101, 104),
        ("X", "wait for work", "main", 0, 106, 110),
    )
    write(
        tmp_path,
        "producer-0",
        ("X", "generate", "", 1, 100, 104),
        ("X", "generate", "", 2, 102, 105),
        ("X", "score", "", 3, 104, 106),
    )
    found = time_parts(tmp_path)
    trainer, producer = found["actors"]
    assert trainer["seconds"] == 10
    assert [(part["name"], part["seconds"], part["is_inside"]) for part in trainer["parts"]] == [
        ("train", 6, False),
        ("forward_backward", 3, True),
        ("wait for work", 4, False),
    ]
    assert [(part["name"], part["seconds"], part["number"]) for part in producer["parts"]] == [
        ("generate", 5, 2),
        ("score", 2, 1),
    ]
    assert producer["spans"] == [[0, 5, 0], [4, 6, 1]], "what overlaps is drawn as one"
    assert trainer["names"] == ["train", "wait for work"], "parts of a part are not drawn"


def test_a_run_without_a_timeline_has_none(tmp_path):
    assert time_parts(tmp_path) == {}


def test_of_each_role_four_actors_are_read_in_the_order_of_their_numbers(tmp_path):
    for number in range(12):
        write(tmp_path, f"producer-{number}", ("X", "generate", "", 1, 100, 104))
    write(tmp_path, "trainer-0", ("X", "train", "main", 0, 100, 104))
    found = time_parts(tmp_path)
    names = ["trainer-0", "producer-0", "producer-1", "producer-2", "producer-3"]
    assert [actor["name"] for actor in found["actors"]] == names
    assert found["left_out"] == 8
