"""Test that the rows of an interrupted command are neither lost nor written twice, and who may write a file."""

import json
from pathlib import Path

import pytest

from coati_rl.errors import ConfigError, RunError
from producer.batch.output import BatchOutput

SETTINGS = {"model": "/m", "temperature": 0.7}


def rows_of(number):
    return [{"uid": f"p{number}", "sample": sample} for sample in range(2)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out" / "rows.jsonl"


@pytest.fixture
def write(path):
    """Write the rows of prompts [first, last), as one command."""

    def command(first, last, settings=SETTINGS, **options):
        with BatchOutput(path, settings, **options) as output:
            assert [record["uid"] for record in output.records] == [f"p{number}" for number in range(first)]
            for number in range(first, last):
                output.add({"uid": f"p{number}"}, rows_of(number))

    return command


def written(path):
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def progress(path):
    return path.with_name("rows.jsonl.progress")


def test_a_command_goes_on_where_it_ended(write, path):
    write(0, 2)
    write(2, 3)
    assert written(path) == [*rows_of(0), *rows_of(1), *rows_of(2)]


def test_rows_without_a_line_of_progress_are_cut_off_and_written_again(write, path):
    write(0, 2)
    with path.open("a") as file:
        file.write(json.dumps(rows_of(2)[0]) + '\n{"uid": "p2", "sam')
    write(2, 3)
    assert written(path) == [*rows_of(0), *rows_of(1), *rows_of(2)]


def test_a_truncated_line_of_progress_is_no_finished_prompt(write, path):
    write(0, 2)
    text = progress(path).read_text()
    progress(path).write_text(text[:-5])
    write(1, 3)
    assert written(path) == [*rows_of(0), *rows_of(1), *rows_of(2)]
    assert len(progress(path).read_text().splitlines()) == 4


def test_a_prompt_without_rows_is_finished_too(write, path):
    with BatchOutput(path, SETTINGS) as output:
        output.add({"uid": "p0", "error": "too long"}, [])
    write(1, 2)
    assert written(path) == rows_of(1)


def test_nothing_is_written_before_the_file_is_opened(path):
    BatchOutput(path, SETTINGS)
    assert not path.parent.exists()


def test_rows_of_other_settings_are_refused_with_what_differs_and_replaced_if_asked(write, path):
    write(0, 2)
    other = {**SETTINGS, "temperature": 1.0}
    with pytest.raises(ConfigError, match=r"rows.jsonl: was written with temperature 0.7, not 1.0; give another -o"):
        BatchOutput(path, other)
    assert written(path) == [*rows_of(0), *rows_of(1)]
    write(0, 1, other, overwrite=True)
    assert written(path) == rows_of(0)


def test_a_file_of_somebody_else_is_refused(path):
    path.parent.mkdir()
    path.write_text("mine\n")
    with pytest.raises(ConfigError, match=r"exists, and there is no rows.jsonl.progress; give another -o, or --overwr"):
        BatchOutput(path, SETTINGS)
    assert path.read_text() == "mine\n"


@pytest.mark.parametrize("text", ["not JSON\n", "[]\n", '{"format": 1}\n'])
def test_a_progress_that_is_none_is_refused(path, text):
    path.parent.mkdir()
    progress(path).write_text(text)
    with pytest.raises(ConfigError, match=r"rows.jsonl.progress cannot be read; give another -o"):
        BatchOutput(path, SETTINGS)


def test_rows_that_were_cut_since_are_refused(write, path):
    write(0, 2)
    path.write_text(path.read_text()[:-10])
    with pytest.raises(ConfigError, match=r"rows.jsonl: has \d+ bytes where \d+ were written; give another -o"):
        BatchOutput(path, SETTINGS)


def test_two_commands_do_not_write_one_file(path):
    with (
        BatchOutput(path, SETTINGS),
        pytest.raises(ConfigError, match="another process writes this file"),
    ):
        BatchOutput(path, SETTINGS).__enter__()


def test_a_full_disk_is_told_with_the_path(path):
    path.parent.mkdir()
    path.symlink_to("/dev/full")
    output = BatchOutput(path, SETTINGS, overwrite=True)
    with pytest.raises(RunError, match=f"{path} cannot be written: "), output:
        output.add({"uid": "p0"}, rows_of(0))


def test_a_disk_that_fills_up_while_rows_are_written_is_told_with_the_path(path):
    with pytest.raises(RunError, match="cannot be written: No space left"), BatchOutput(path, SETTINGS) as output:
        output._rows = output._open(Path("/dev/full"))
        output.add({"uid": "p0"}, rows_of(0))


def test_half_of_a_surrogate_pair_is_written_as_its_escape_and_the_rows_are_read_back(path):
    row = {"uid": "p0", "detail": "ValueError: no number: \ud83d, é"}
    with BatchOutput(path, SETTINGS) as output:
        output.add({"uid": "p0"}, [row])
    assert written(path) == [row]
    assert "\\ud83d, é" in path.read_text(encoding="utf-8")
    with BatchOutput(path, SETTINGS) as output:
        assert [record["uid"] for record in output.records] == ["p0"]
