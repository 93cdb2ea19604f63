"""Check the rules of the Trace Event Format, as its document and its readers' issue trackers give them."""

from collections import defaultdict


def check_format(trace: list[dict]) -> None:
    """The events are ours, named, those of a process sorted and of a thread nested, asynchronous ones in pairs."""
    names, ends, last_ts, pairs = {}, defaultdict(list), defaultdict(int), defaultdict(list)
    for event in trace:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert 0 < event["pid"] < 2**31
        if event["ph"] == "M":
            assert event["pid"] not in last_ts, "names come first"
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            names[event["name"], event["pid"], event.get("tid")] = event["args"]
            continue
        assert event["ph"] in ("X", "i", "b", "e")
        assert isinstance(event["tid"], int)
        assert 0 < event["tid"] < 2**31
        assert event["tid"] != event["pid"]
        assert ("process_name", event["pid"], None) in names
        assert ("thread_name", event["pid"], event["tid"]) in names
        assert isinstance(event["ts"], int)
        if event["ph"] in ("b", "e"):
            pairs[event["cat"], event["id"]].append((event["ph"], event["name"], event["pid"], event["ts"]))
            if event["ph"] == "e":
                continue
        assert isinstance(event["args"], dict)
        assert event["ts"] >= last_ts[event["pid"]], "events are sorted"
        last_ts[event["pid"]] = event["ts"]
        if event["ph"] == "b":
            continue
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
    for begin, end in pairs.values():
        assert (begin[0], end[0]) == ("b", "e")
        assert begin[1:3] == end[1:3]
        assert begin[3] <= end[3]
    assert len({identity for _, identity in pairs}) == len(pairs)
    tids = [tid for kind, _, tid in names if kind == "thread_name"]
    assert len(tids) == len(set(tids))
