"""The rules of the Trace Event Format for what we write, as its document and the readers' issues give them."""

from collections import defaultdict


def check_format(trace: list[dict]) -> None:
    """The events are ours, named, sorted, and nested on their threads."""
    last_ts, is_metadata = 0, True
    names, ends = {}, defaultdict(list)
    for event in trace:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert 0 < event["pid"] < 2**31
        if event["ph"] == "M":
            assert is_metadata, "names come first"
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            names[event["name"], event["pid"], event.get("tid")] = event["args"]
            continue
        is_metadata = False
        assert event["ph"] in ("X", "i")
        assert isinstance(event["tid"], int)
        assert 0 < event["tid"] < 2**31
        assert event["tid"] != event["pid"]
        assert ("process_name", event["pid"], None) in names
        assert ("thread_name", event["pid"], event["tid"]) in names
        assert isinstance(event["args"], dict)
        assert isinstance(event["ts"], int)
        assert event["ts"] >= last_ts, "events are sorted"
        last_ts = event["ts"]
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
            continue
        assert isinstance(event["dur"], int)
        assert event["dur"] >= 0
        open_ends = ends[event["tid"]]
        while open_ends and open_ends[-1] <= event["ts"]:
            open_ends.pop()
        end = event["ts"] + event["dur"]
        assert not open_ends or end <= open_ends[-1], "spans of a thread nest or are apart"
        open_ends.append(end)
    tids = [tid for kind, _, tid in names if kind == "thread_name"]
    assert len(tids) == len(set(tids))
