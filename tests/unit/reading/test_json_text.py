"""JSON of rows: lists, lines, values one after the other, and what is refused with its row."""

import pytest

from coati_rl.errors import ConfigError
from coati_rl.reading.files import read_rows
from coati_rl.reading.streamed_rows import StreamedRows


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('[{"a": 1}, {"b": null}]', [{"a": 1}, {"b": None}]),
        ('\ufeff [\n{"a": 1}\n,{"b": 2}\n] \n', [{"a": 1}, {"b": 2}]),
        ('{"a": 1}\n{"a": 2}\n\n', [{"a": 1}, {"a": 2}]),  # JSON Lines
        ('{\n "a": 1\n}', [{"a": 1}]),
        ('["a document"]', [{"text": "a document"}]),
    ],
)
def test_a_json_file_is_a_list_or_values_one_after_the_other(text, rows, tmp_path):
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    assert read_rows(str(tmp_path / "a.json"), flag="-d") == [
        (f"-d {tmp_path}/a.json, row {number}", row) for number, row in enumerate(rows, 1)
    ]


@pytest.mark.parametrize(
    "text", ['[{"a": 1}', '[{"a": 1} {"a": 2}]', '[{"a": 1}] 2', '[{"a": 1},]', '{"a": 1}, {"a": 2}', "[1,"]
)
def test_a_json_file_that_breaks_off_is_refused_with_the_place(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"^-d {tmp_path}/a.json: cannot be read as json: .* line 1 column \d+"):
        read_rows(str(tmp_path / "a.json"), flag="-d")


DEEP = '{"messages": "hi", "n": ' + "[" * 20_000 + "]" * 20_000 + "}"
UNUSABLE = [
    ('{"messages": [{"content": "bad \\ud83d end"}]}', r"messages holds \ud83d, half of a surrogate pair, which no"),
    ('{"messages": "hi", "other": {"\\uDE00": 1}}', r"other holds \ude00, half of a surrogate pair"),
    ('{"messages": "hi", "n": [' + "7" * 5000 + "]}", "holds an integer of more than 4300 digits; write it as text"),
    (DEEP, "is nested more than 100 deep; write what is deeper as text"),
    ('{"messages": "hi", "n": ' + "[" * 100 + "]" * 100 + "}", "is nested more than 100 deep"),
]


@pytest.mark.parametrize(("row", "cause"), UNUSABLE, ids=["half", "half of a key", "digits", "deep", "just too deep"])
@pytest.mark.parametrize("form", ["jsonl", "json", "streamed"])
def test_a_row_that_nothing_can_use_is_named(row, cause, form, tmp_path):
    path = tmp_path / ("a.json" if form == "json" else "a.jsonl")
    path.write_text('{"messages": "\\ud83d\\ude00 ' + "[" * 200 + '"}\n' + row)
    with pytest.raises(ConfigError) as caught:
        if form == "streamed":
            StreamedRows(str(path), flag="-d", read=lambda where, row: (where, row))
        else:
            read_rows(str(path), flag="-d")
    assert str(caught.value).startswith(f"-d {path}, {'row' if form == 'json' else 'line'} 2: {cause}")


def test_what_is_nested_as_deep_as_allowed_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": ' + "[" * 99 + "]" * 99 + "}")
    assert len(read_rows(str(tmp_path / "a.jsonl"), flag="-d")) == 1
