"""Test the server of the live page: who may ask, what the files have gained, and notes."""

import fcntl
import json
import re
import resource
import signal
import subprocess
import sys

import httpx2 as httpx
import pytest

from coati_rl.command_line import main
from coati_rl.errors import RunError
from coati_rl.report.annotations import MAX_FILE_BYTES, Note, annotate
from coati_rl.report.live import changes
from coati_rl.report.watch_app import make_app
from coati_rl.run_reader.run_directory import RunDirectory
from producer.gateway.server import ServerThread
from tests.run_files import STEP, TOKENS

TOKEN = "a-token-of-this-test"


@pytest.fixture
def run(write_run):
    return write_run(
        steps=[{}, {}], rollouts=[{}, {"step": 2, **TOKENS}, {"step": 2, "sample": 1, "episode": 1, "reward": 0.0}]
    )


@pytest.fixture
def client(run):
    server = ServerThread(make_app(RunDirectory(run), TOKEN))
    try:
        with httpx.Client(base_url=f"{server.url}/{TOKEN}/", timeout=20) as client:
            yield client
    finally:
        server.close()


def positions_in(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])["live"]["positions"]


def append(run, **fields):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(STEP | fields) + "\n")


def test_the_page_gets_what_was_written_since_it_was_loaded_and_nothing_twice(client, run):
    page = client.get("")
    assert page.headers["content-type"] == "text/html; charset=utf-8" and "connect-src 'self'" in page.text
    positions = positions_in(page.text)
    first = client.get("changes", params=positions).json()
    assert (first["steps"], first["positions"], first["is_running"]) == ([], positions, False)
    append(run, step=3, loss=0.5)
    (run / "eval/summary.jsonl").write_text('{"step": 3, "task": "math", "accuracy": 0.5}\n')
    news = client.get("changes", params=positions).json()
    assert [(step["step"], step["loss"], step["samples"], step["tokens_per_s"]) for step in news["steps"]] == [
        (3, 0.5, 16, 4)
    ]
    assert news["evaluations"] == {"eval/math/accuracy": [[3, 0.5]]}
    assert client.get("changes", params=news["positions"]).json()["steps"] == []


def test_a_step_that_is_being_written_comes_when_it_is_whole(run):
    positions = changes(RunDirectory(run), {})["positions"]
    line = json.dumps(STEP | {"step": 3})
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line[:20])
        file.flush()
        assert changes(RunDirectory(run), positions)["steps"] == []
        file.write(line[20:] + "\n")
    assert [step["step"] for step in changes(RunDirectory(run), positions)["steps"]] == [3]


def test_files_that_a_resume_has_written_anew_are_told_so_that_the_page_is_loaded_again(run):
    positions = changes(RunDirectory(run), {})["positions"]
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "new").write_text(lines[0])
    (run / "new").replace(run / "metrics.jsonl")
    assert changes(RunDirectory(run), positions) == {"is_rewritten": True}
    assert changes(RunDirectory(run), {"steps": "not a position"})["is_rewritten"] is False


def test_a_steps_rollouts_are_read_when_they_are_asked_for(client):
    found = client.get("steps/2").json()
    assert [each["reward"] for each in found["rollouts"]] == [1, 0]
    assert found["groups"][0]["rewards"] == [1, 0]
    assert client.get("steps/7").json() == {"groups": [], "rollouts": []}


def test_reading_takes_no_lock_and_says_that_the_run_goes_on(client, run):
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert client.get("changes").json()["is_running"] is True
        assert client.get("changes").json()["checkpoint"] is None
    assert {path.name for path in run.iterdir()} == {".lock", "config.yaml", "eval", "metrics.jsonl", "rollouts"}


@pytest.mark.parametrize("path", ["", "changes", "steps/1"])
def test_without_the_token_nothing_is_shown(client, path):
    for wrong in ("wrong", TOKEN[:-1], "\u00e9"):
        reply = client.get(f"{own(client)['Origin']}/{wrong}/{path}")
        assert (reply.status_code, reply.json()) == (404, {"error": "no such page"})


def test_a_page_from_elsewhere_can_neither_ask_nor_write(client, run):
    assert client.get("changes", headers={"Host": "attacker.test"}).status_code == 403
    note = {"step": 1, "uid": "train-1.0", "sample": 0, "text": "x"}
    for origin in ({}, {"Origin": "http://attacker.test"}, {"Origin": "null"}):
        assert client.post("annotations", json=note, headers=origin).status_code == 403
    assert not (run / "annotations.jsonl").exists()


def own(client):
    return {"Origin": str(client.base_url).split(f"/{TOKEN}")[0]}


def test_a_note_is_kept_beside_the_run_and_comes_back_as_it_was(client, run):
    text = '</script>\u202e\n"\ud83d'
    body = json.dumps({"step": 2, "uid": "train-1.0", "sample": 1, "text": text}).replace("\\ud83d", "\u00e9")
    assert client.post("annotations", content=body.encode(), headers=own(client)).status_code == 200
    (note,) = RunDirectory(run).annotations()
    assert (note["step"], note["uid"], note["sample"], note["text"]) == (2, "train-1.0", 1, '</script>\u202e\n"\u00e9')
    assert (run / "annotations.jsonl").read_bytes().count(b"\n") == 1
    assert client.get("changes").json()["annotations"] == [note | {"text": r"</script>\u202e" + '\n"\u00e9'}]


@pytest.mark.parametrize(
    ("note", "status", "message"),
    [
        ({"text": " "}, 422, "text: String should have at least 1 character"),
        ({"text": "x" * 4001}, 422, "text: String should have at most 4000 characters"),
        ({"step": 0}, 422, "step: Input should be greater than or equal to 1"),
        ({"path": "/etc"}, 422, "path: Extra inputs are not permitted"),
        ({"text": "x" * 100_000}, 413, "the note is larger than 65536 bytes"),
    ],
)
def test_notes_are_bounded(client, run, note, status, message):
    reply = client.post(
        "annotations", json={"step": 1, "uid": "u", "sample": 0, "text": "x"} | note, headers=own(client)
    )
    assert (reply.status_code, reply.json()["error"]) == (status, message)
    assert not (run / "annotations.jsonl").exists()


def test_a_note_that_does_not_fit_on_the_disk_is_refused_and_leaves_the_others_readable(run):
    note = Note(step=1, uid="train-1.0", sample=0, text="x")
    annotate(run, note)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signals = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((run / "annotations.jsonl").stat().st_size + 20, limits[1]))
    try:
        with pytest.raises(RunError, match=r"annotations\.jsonl cannot be written"):
            annotate(run, note)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, signals)
    annotate(run, note)
    assert [each["text"] for each in RunDirectory(run).annotations()] == ["x", "x"]


def test_a_full_file_of_notes_takes_no_more(client, run):
    (run / "annotations.jsonl").write_bytes(b'{"x": 1}\n' + b" " * MAX_FILE_BYTES)
    reply = client.post("annotations", json={"step": 1, "uid": "u", "sample": 0, "text": "x"}, headers=own(client))
    assert reply.status_code == 409 and "has 4 MiB of notes, and takes no more" in reply.json()["error"]


@pytest.mark.full
def test_the_command_says_where_the_page_is_and_ends_with_a_signal(run):
    code = "import sys; from coati_rl.command_line import main; sys.exit(main(['watch', sys.argv[1]]))"
    process = subprocess.Popen([sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().split()[0]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", url)
        assert httpx.get(url + "changes", timeout=20).json()["is_rewritten"] is False
        assert httpx.get(url.rsplit("/", 2)[0], timeout=20).status_code == 404
    finally:
        process.terminate()
    assert process.wait(60) == 0
    process.stdout.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "--port 70000: give 1 to 65535, or 0 for a free one"),
        ([], "has no config.yaml; give the directory of a run"),
    ],
)
def test_mistakes_are_told_with_exit_code_2(run, capsys, arguments, message):
    assert main(["watch", str(run if arguments else run / "eval"), *arguments]) == 2
    assert message in capsys.readouterr().err
