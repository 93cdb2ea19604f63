"""Test the page as a file: what it admits and loads, that hostile text stays text, its size, and what is refused."""

import base64
import hashlib
import json
import re

import pytest

from coati_rl.command_line import main
from coati_rl.errors import ConfigError
from coati_rl.report.escaped_json import as_json
from coati_rl.report.page import MAX_BYTES, html_page, report
from coati_rl.report.run_data import ReportData
from tests.run_files import LINE, TOKENS

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>\x1b[2J\u202e\u2028&amp;\ud83d"


def data_of(page):
    """The data in a page, as its own program finds it."""
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page.decode(), re.DOTALL)[1]
    )


def test_the_policy_admits_the_pages_own_style_and_program_and_nothing_else(write_run):
    page = report([write_run()]).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    admitted = dict(part.split(" ", 1) for part in policy.split("; "))
    assert (
        admitted["default-src"]
        == admitted["connect-src"]
        == admitted["base-uri"]
        == admitted["form-action"]
        == "'none'"
    )
    for kind, tag in (("script-src", "script"), ("style-src", "style")):
        (own,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert admitted[kind] == f"'sha256-{digest}'"
    assert "connect-src 'self'" in html_page({}, title="", is_live=True).decode()


def test_the_page_loads_nothing_and_links_nowhere(write_run):
    page = report([write_run()]).decode()
    assert set(re.findall(r"https?://[^\s\"'`<]+", page)) == {"http://www.w3.org/2000/svg"}, (
        "the name of SVG, no address"
    )
    assert not re.findall(
        r"<(?:link|img|iframe|object|embed)\b|\bsrc=|@import|url\(|\beval\(|innerHTML|insertAdjacentHTML|document\.write",
        page,
    )
    assert all(target.startswith("#") for target in re.findall(r'href="([^"$]*)"', page))


def test_what_a_model_says_is_data_that_ends_no_element(write_run):
    line = {
        "prompt": HOSTILE,
        "response": HOSTILE,
        "gt_answer": HOSTILE,
        "detail": HOSTILE,
        "uid": HOSTILE,
        "task": HOSTILE,
        **TOKENS,
    }
    page = report([write_run(rollouts=[line], config={"model": HOSTILE})])
    assert page.count(b"</script>") == 2 and page.count(b"<script") == 2
    assert b"<!--" not in page and b"onerror=alert(1)>" not in page
    (shown,) = data_of(page)["runs"][0]["rollouts"]
    said = shown["messages"][0][1]
    assert said == r"</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>\x1b[2J\u202e\u2028&amp;\ud83d"
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202e]", page.decode())


def test_half_of_a_surrogate_pair_anywhere_is_written_as_its_escape():
    written = as_json({"text": "\ud83d<>&\u2028"})
    assert written == b'{"text":"\\ud83d\\u003c\\u003e\\u0026\\u2028"}'
    assert json.loads(written) == {"text": "\ud83d<>&\u2028"}


@pytest.mark.full
def test_a_page_is_small_though_answers_are_megabytes(write_run):
    number = 50_000
    huge = {
        "response": "\u6570\x00" * 500_000,
        "token_ids": [1] * number,
        "rollout_logprobs": [-0.123456789] * number,
    }
    tokens = TOKENS | {"token_versions": [[0, number]]}
    rollouts = [{"step": step, "uid": f"train-{step}", **tokens, **huge} for step in (1, 2)]
    page = report([write_run(steps=[{}, {}], rollouts=rollouts)])
    assert len(page) < MAX_BYTES
    assert "characters left out" in page.decode()


@pytest.mark.full
def test_what_does_not_fit_is_left_out_and_the_page_says_so(write_run):
    rollouts = [
        {"step": step, "uid": f"train-{number}", "sample": 0, "response": "\x00" * 4000}
        for step in range(1, 11)
        for number in range(20)
    ]
    run = write_run(steps=[{}] * 10, rollouts=rollouts)
    most = len(report([run], max_bytes=MAX_BYTES)) - 100_000
    page = report([run], max_bytes=most)
    assert len(page) <= most
    shown = data_of(page)["runs"][0]
    assert len(shown["rollouts"]) < 80 or "left out" in json.dumps(shown["rollouts"])


def test_a_page_of_which_nothing_more_can_be_left_out_is_refused(write_run):
    runs = [write_run(name, rollouts=[{}]) for name in ("one", "other")]
    whole = len(report(runs))
    bare = data_of(report(runs, max_bytes=whole - 100))["runs"]
    assert [(each["rollouts"], each["groups"], each["read"]["is_halved"]) for each in bare] == [([], [], True)] * 2
    with pytest.raises(ConfigError, match=r"2 runs: the page would have [\d,]+ bytes .*; give fewer runs"):
        report(runs, max_bytes=10_000)


def test_of_a_long_run_steps_are_chosen_evenly_and_those_that_are_asked_for(write_run):
    rollouts = [{"step": step} for step in range(1, 301)]
    run = write_run(steps=[{}] * 300, rollouts=rollouts)
    chosen = ReportData(run, "run").steps_to_show(4, also=(137,))
    assert chosen == [1, 101, 137, 200, 300]
    shown = data_of(report([run], steps=[137]))["runs"][0]
    assert shown["read"]["steps"][0] == 1 and shown["read"]["steps"][-1] == 300 and 137 in shown["read"]["steps"]
    assert len(shown["columns"]["loss"]["mean"]) == 200 < shown["num_steps"]


def test_a_broken_run_is_shown_up_to_where_it_broke(write_run):
    run = write_run(steps=[{"loss": 0.5}, {"loss": 0.25}], rollouts=[{}, {"step": 2}])
    for name in ("metrics.jsonl", "eval/summary.jsonl", "rollouts/steps-000001-000100.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 3, "lo')
    shown = data_of(report([run]))["runs"][0]
    assert shown["columns"]["loss"]["mean"] == [0.5, 0.25]
    assert [each["step"] for each in shown["rollouts"]] == [1, 2]


def test_a_run_without_a_step_a_job_on_a_dataset_and_a_resumed_run_have_a_page(write_run, capsys):
    empty = write_run("empty", steps=[])
    step = {"loss": 0.7, "num_samples": 32, "num_tokens": 64, "reward_mean": None, "groups_total": None}
    sft = write_run("sft", job="sft", steps=[step])
    resumed = write_run("resumed", steps=[{"step": 41}, {"step": 42}], rollouts=[{"step": 41}])
    (resumed / "resumes.jsonl").write_text('{"time": "now", "step": 40, "checkpoint": "x", "changes": ["lr was 1"]}\n')
    (resumed / "logs").mkdir()
    (resumed / "logs" / "driver.log").write_text(
        "2026-01-01 10:00:00,000 INFO a.b: fine\n2026-01-01 10:00:00,000 ERROR a.b: lost\n"
    )
    assert data_of(report([empty]))["runs"][0]["last_step"] is None
    shown = data_of(report([sft]))["runs"][0]
    assert (shown["job"], shown["rollouts"], shown["columns"]["samples"]["mean"]) == ("sft", [], [32])
    shown = data_of(report([resumed]))["runs"][0]
    assert (shown["first_step"], shown["problems"]) == (41, ["lost"])
    assert shown["resumptions"] == [{"time": "now", "step": "40", "checkpoint": "x", "changes": '["lr was 1"]'}]
    assert main(["report", str(empty), str(sft), str(resumed), "-o", str(empty / "all.html")]) == 0
    assert capsys.readouterr().out == f"{empty}/all.html\n"


def test_two_runs_are_compared_and_their_settings_that_differ_named(write_run):
    one = write_run("one", steps=[{"reward_mean": 0.2}], config={"seed": 0})
    other = write_run("other", steps=[{"reward_mean": 0.4}, {"reward_mean": 0.6}], config={"seed": 1})
    data = data_of(report([one, other]))
    assert data["differences"] == ["seed"] and data["seed_groups"] == [[0, 1]]
    assert data["comparison"][0]["limit"] == 1
    assert {"name": "reward_mean", "values": [0.2, 0.4]} in data["comparison"][0]["rows"]


def test_notes_and_the_machine_are_on_the_page(write_run):
    run = write_run(rollouts=[LINE])
    note = {"time": "now", "step": 1, "uid": "train-1.0", "sample": 0, "text": "<b>odd"}
    (run / "annotations.jsonl").write_text(json.dumps(note) + "\n")
    (run / "machine.jsonl").write_text(json.dumps({"cpu": "x", "gpus": ["A", "A"], "packages": {"torch": "2"}}) + "\n")
    shown = data_of(report([run]))["runs"][0]
    assert shown["annotations"] == [note]
    assert shown["starts"] == [{"cpu": "x", "gpus": "A, A", "packages": "torch 2"}]


def test_of_thousands_of_notes_the_last_are_shown_and_steps_stay_few(write_run):
    run = write_run(steps=[{}] * 300, rollouts=[{"step": step} for step in range(1, 301)])
    notes = [
        {"time": "now", "step": number % 300 + 1, "uid": "train-1.0", "sample": 0, "text": "x"}
        for number in range(3000)
    ]
    (run / "annotations.jsonl").write_text('{"by hand": 1}\n' + "".join(json.dumps(note) + "\n" for note in notes))
    shown = data_of(report([run]))["runs"][0]
    assert (shown["num_notes"], len(shown["annotations"])) == (3001, 200)
    assert len(shown["read"]["steps"]) <= 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "{run}", "-o", "x.html"], "the run is named twice; name it once"),
        (["{run}", "{other}"], "several runs are shown in one page: name it with -o FILE.html"),
        (["{run}/eval"], "has no config.yaml; give the directory of a run"),
        (["{run}", "-o", "{run}/no/x.html"], "cannot be written: No such file or directory"),
        (["{run}", "--steps", "1,7"], "--steps 1,7: no rollout is recorded for it; leave it out"),
        (["{run}", "--steps", "1,x"], "--steps 1,x: give optimizer steps, from 1, with commas between them, as 1,137"),
    ],
)
def test_mistakes_are_told_with_exit_code_2(write_run, capsys, arguments, message):
    places = {"run": write_run(), "other": write_run("other")}
    assert main(["report", *(word.format(**places) for word in arguments)]) == 2
    assert message in capsys.readouterr().err
