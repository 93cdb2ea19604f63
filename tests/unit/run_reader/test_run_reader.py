"""Test what is read of a run's directory, and how its rollouts are shown."""

import fcntl
import json

import pytest

from coati_rl.command_line import main
from coati_rl.errors import ConfigError
from coati_rl.run_reader.json_lines import (
    StalePositionError,
    end_of_lines,
    first_lines,
    last_lines,
    read_json_lines,
    read_new_lines,
)
from coati_rl.run_reader.run_directory import RunDirectory
from coati_rl.run_reader.step_lines import last_step, lines_of_step, without_tokens
from coati_rl.text import printable

LINE = {
    "step": 1, "uid": "train-1.0", "sample": 0, "episode": 0, "producer": 0, "prompt": "1 + 1?", "gt_answer": "2",
    "response": "2", "num_tokens": 1, "finish_reason": "stop", "temperature": 1.0, "policy_versions": [0, 0],
    "reward": 1.0, "answer_correct": True, "format_valid": True, "verdict": "ok", "detail": "", "is_trained": True,
    "advantage": 0.5,
}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    """Write a run's directory with these rollouts by file, and steps."""

    def write(rollouts, steps=({"step": 1, "loss": 0.25},)):
        (tmp_path / "rollouts").mkdir()
        (tmp_path / "config.yaml").write_text("run:\n  project: test\n")
        for name, lines in rollouts.items():
            text = "".join(json.dumps(LINE | line, ensure_ascii=False) + "\n" for line in lines)
            (tmp_path / "rollouts" / name).write_text(text, encoding="utf-8")
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        return tmp_path

    return write


FIRST, SECOND = "steps-000001-000100.jsonl", "steps-000101-000200.jsonl"


def test_lines_end_at_line_feeds_alone_and_one_that_is_cut_off_is_left_out(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes('{"text": "a\u2028b\x85c"}\n{"text": "'.encode())
    assert [*read_json_lines(path)] == [{"text": "a\u2028b\x85c"}]
    path.write_text('{"a": 1}\n[1]\n{"a": 2}\n')
    with pytest.raises(ConfigError, match=r"lines.jsonl:2: the line is not of a run: it is not an object"):
        [*read_json_lines(path)]
    assert [*read_json_lines(tmp_path / "missing")] == []


def test_damaged_lines_are_left_out_where_it_is_asked_for_and_excerpts_are_bounded(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2, "te{"n": 3}\n[4]\n\xff\n{"n": 5}\n{"n": 6}\n{"n": 7')
    assert [each["n"] for each in read_json_lines(path, skips_damaged=True)] == [1, 5, 6]
    assert [each["n"] for each in first_lines(path, max_lines=5, max_bytes=100)] == [1, 5]
    assert [each["n"] for each in first_lines(path, max_lines=9, max_bytes=10)] == [1]
    assert [each["n"] for each in last_lines(path, max_lines=2, max_bytes=100)] == [6]
    assert [each["n"] for each in last_lines(path, max_lines=9, max_bytes=20)] == [6]


def test_a_step_is_read_from_the_file_that_holds_it(write):
    run = RunDirectory(write({FIRST: [{}, {"step": 2}], SECOND: [{"step": 101}], "steps-other.jsonl": [{}]}))
    assert [each.step for each in run.rollouts()] == [1, 2, 101]
    assert [each.uid for each in run.rollouts(101)] == ["train-1.0"]
    (run.path / "rollouts" / FIRST).write_text("this file is not read\n")
    assert [each.step for each in run.rollouts(101)] == [101]
    assert run.steps() == [{"step": 1, "loss": 0.25}]
    assert run.config() == {"run": {"project": "test"}}
    assert run.evaluations() == run.syncs() == run.checkpoints() == []


def test_a_run_is_running_while_a_process_holds_its_lock_and_reading_does_not_take_it(write):
    run = RunDirectory(write({FIRST: [{}]}))
    assert not run.is_running()
    with (run.path / ".lock").open("w") as lock:
        assert not run.is_running()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert run.is_running()
    assert not run.is_running()


def test_the_best_answer_of_each_prompt_comes_first_and_the_worst_last(write, capsys):
    rewards = [0.0, 1.0, None, 0.5]
    lines = [{"sample": n, "reward": reward, "response": f"answer {n}"} for n, reward in enumerate(rewards)]
    other = {"uid": "train-2.0", "gt_answer": "3", "is_trained": False, "advantage": None}
    run = write({FIRST: [*lines, other]})
    assert main(["show", str(run), "-n", "1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"{run}: not running, 1 step, no checkpoint"
    assert shown[1] == "step 1: 5 rollouts, loss 0.25"
    assert shown[3] == "train-1.0: rewards 0 1 - 0.5; 4 of 4 trained; ground truth: 2"
    assert [line.strip() for line in shown if "answer: answer" in line] == ["answer: answer 1", "answer: answer 2"]
    assert "train-2.0: rewards 1; 0 of 1 trained; ground truth: 3" in shown
    assert "  sample 0: reward 1, ok, not trained, 1 token, stop, version 0" in shown
    assert main(["show", str(run), "--uid", "train-1.0", "-n", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("answer 1") < shown.index("answer 3") < shown.index("answer 0") < shown.index("answer 2")
    assert "train-2.0" not in shown


def test_conversations_are_shown_with_the_calls_of_tools(write, capsys):
    call = {"type": "function", "function": {"name": "python", "arguments": '{"code": "1+1"}'}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "2"}]},
    ]
    assert main(["show", str(write({FIRST: [{"messages": messages}]}))]) == 0
    shown = capsys.readouterr().out
    assert '    assistant: -> python({"code": "1+1"})\n    tool: 2\n' in shown


def test_what_a_model_says_does_not_reach_the_terminal_as_a_command(write, capsys):
    said = "a\x1b[2Jb\u202ec\u2028d\re\x85f\ud83d" + "x" * 3000
    lines = json.dumps(LINE | {"response": said, "detail": "\x1b]0;title\x07"}) + "\n"
    run = write({})
    (run / "rollouts" / FIRST).write_text(lines)
    assert main(["show", str(run)]) == 0
    shown = capsys.readouterr().out
    assert r"a\x1b[2Jb\u202ec\u2028d\re\x85f\ud83d" in shown
    assert shown.isprintable() or {each for each in shown if not each.isprintable()} == {"\n"}
    assert "more characters" in shown and len(shown) < 3000
    assert printable("tab\tand\nline, é, 数, 🎉") == "tab\tand\nline, é, 数, 🎉"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "7"], "no rollout is recorded for step 7"),
        (["--uid", "other"], "no rollout of prompt other is recorded for step 1"),
    ],
)
def test_what_is_not_there_is_named(write, capsys, arguments, message):
    run = write({FIRST: [{}]})
    assert main(["show", str(run), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert main(["show", str(run / "rollouts")]) == 2
    assert "has no config.yaml; give the directory of a run" in capsys.readouterr().err


def test_a_job_without_rollouts_and_a_line_of_another_version_are_named(write, capsys):
    run = write({})
    assert main(["show", str(run)]) == 2
    assert "no rollout is recorded; a job on a dataset has none" in capsys.readouterr().err
    (run / "rollouts" / FIRST).write_text('{"step": 1}\n')
    assert main(["show", str(run), "--step", "1"]) == 2
    assert "a rollout has no field 'uid'" in capsys.readouterr().err


def test_lines_that_were_added_are_read_from_a_position_and_one_that_is_being_written_later(tmp_path):
    path = tmp_path / "lines.jsonl"
    assert read_new_lines(path) == ([], "") and end_of_lines(path) == ""
    path.write_bytes('{"a": "b\u2028"}\n{"a"'.encode())
    records, position = read_new_lines(path)
    assert records == [{"a": "b\u2028"}]
    assert end_of_lines(path) == position
    assert read_new_lines(path, position) == ([], position)
    with path.open("a") as file:
        file.write(': 2}\n{"a": 3}\n')
    records, position = read_new_lines(path, position)
    assert records == [{"a": 2}, {"a": 3}] and end_of_lines(path) == position
    path.write_text("broken\n")
    with pytest.raises(ConfigError, match=r"lines.jsonl, behind byte 0: a line is not of a run"):
        read_new_lines(path)


def test_a_position_in_a_file_that_is_another_one_by_now_is_told(tmp_path):
    path, new = tmp_path / "lines.jsonl", tmp_path / "new"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    position = end_of_lines(path)
    new.write_text('{"a": 1}\n{"a": 3}\n{"a": 4}\n')
    new.replace(path)  # as a resumed run does
    with pytest.raises(StalePositionError):
        read_new_lines(path, position)
    position = end_of_lines(path)
    path.unlink()
    with pytest.raises(StalePositionError):
        read_new_lines(path, position)


@pytest.mark.parametrize("size", [10, 5000])
def test_the_lines_of_any_step_are_found_though_only_a_few_are_read(tmp_path, size):
    path = tmp_path / "steps-000001-000100.jsonl"
    steps = [step for step in range(1, 101) if step % 7 for _ in range(step % 3 + 1)]
    lines = [json.dumps({"step": step, "text": "x" * (size + step)}) + "\n" for step in steps]
    path.write_text("".join(lines) + '{"step": 100, "text": "cut o')
    for step in range(102):
        found = [*lines_of_step(path, step)]
        assert [line.decode() for _, line in found] == [lines[i] for i, each in enumerate(steps) if each == step]
        assert [start for start, _ in found] == [
            len("".join(lines[:i])) for i, each in enumerate(steps) if each == step
        ]
    assert last_step(path) == 100


def test_the_last_step_of_a_file_is_read_from_its_end(tmp_path):
    path = tmp_path / "steps-000001-000100.jsonl"
    for text, step in [
        ("", None),
        ('{"step": 1', None),
        ('{"step": 1}\n', 1),
        ('{"step": 1}\n{"step": 9, "x": "' + "y" * 3_000_000, 1),
    ]:
        path.write_text(text)
        assert last_step(path) == step
    path.write_text('{"step": 1}\n' + json.dumps({"step": 2, "x": "y" * 3_000_000}) + "\n")
    assert last_step(path) == 2


def test_a_line_is_read_without_its_tokens_whatever_its_texts_say():
    record = LINE | {"response": '", "prompt_token_ids": [1]', "prompt_token_ids": [1], "token_ids": [2]}
    assert without_tokens(json.dumps(record).encode()) == LINE | {"response": '", "prompt_token_ids": [1]'}
    noted = LINE | {"environment": {"x": 1, "prompt_token_ids": [1]}, "prompt_token_ids": [1]}
    assert without_tokens(json.dumps(noted).encode()) == noted
    assert without_tokens(json.dumps(LINE).encode()) == LINE


def test_places_of_rollouts_lead_to_all_of_their_fields(write):
    run = RunDirectory(write({FIRST: [{"step": 1, "token_ids": [1]}, {"step": 2, "token_ids": [2]}]}))
    ((place, rollout),) = run.rollouts_without_tokens(2)
    assert rollout.step == 2
    assert run.rollout_at(place).line["token_ids"] == [2]
    assert run.last_rollout_step() == 2
    (run.path / "rollouts" / FIRST).write_text('{"step": 2, broken\n')
    with pytest.raises(ConfigError, match=r"000100.jsonl, at byte 0: the line is not of a run"):
        [*run.rollouts(2)]


def test_warnings_and_errors_are_read_from_the_end_of_the_drivers_log(write):
    run = RunDirectory(write({}))
    assert run.problems() == []
    (run.path / "logs").mkdir()
    lines = ["INFO a.b: fine", "WARNING a.b: odd", "ERROR c: lost: producer 0"]
    (run.path / "logs" / "driver.log").write_text("".join(f"2026-01-01 10:00:00,000 {line}\n" for line in lines))
    assert run.problems() == ["odd", "lost: producer 0"]


def test_outputs_in_other_directories_are_found_as_the_settings_name_them(write, tmp_path):
    run = RunDirectory(write({FIRST: [{}]}))
    (run.path / "rollouts").rename(tmp_path / "elsewhere")
    (tmp_path / "summaries").mkdir()
    (tmp_path / "summaries" / "summary.jsonl").write_text('{"step": 1, "task": "math"}\n')
    settings = f"rollout_save_dir: {tmp_path}/elsewhere\neval_save_dir: {tmp_path}/summaries\nsave_dir: null\n"
    (run.path / "config.yaml").write_text(settings)
    assert [each.step for each in run.rollouts()] == [1]
    assert run.evaluations() == [{"step": 1, "task": "math"}]
    assert run.checkpoints() == []


@pytest.mark.parametrize("content", ["größe: 1".encode("latin-1"), b"- a\n- b", b"some text", b"day: 2026-02-30", b""])
def test_a_file_of_settings_that_holds_none_is_refused_by_name(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.yaml: .*; give the directory of a run"):
        RunDirectory(tmp_path).config()
