"""The same rows as JSONL, JSON, CSV, Parquet, Arrow, a saved dataset and the hub's cache have the same values."""

import csv
import json
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coati_rl.errors import ConfigError
from coati_rl.reading.arrow_values import rows_of_dataset
from coati_rl.reading.files import read_rows
from coati_rl.reading.json_text import json_values
from coati_rl.reading.offline_samples import sft_samples
from coati_rl.reading.row_formats import read_forms

FORMATS = ("jsonl", "json", "csv", "parquet", "arrow", "saved", "hub")
COLUMNS = "parquet", "arrow", "saved", "hub"  # whose values have the type of a column
# Writes calls and schemas as the templates of Qwen2.5 and Hermes do, nulls included.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """format, rows -> what -d is given; a dataset of the hub is a saved one, which `load_dataset` is to return."""
    numbers, folder = count(), tmp_path_factory.mktemp("rows")

    def make(form, rows):
        from datasets import Dataset

        path = folder / f"{next(numbers)}.{form}"
        if form == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        elif form == "json":
            path.write_text(json.dumps(rows), encoding="utf-8")
        elif form == "csv":
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, [*dict.fromkeys(key for row in rows for key in row)], restval="")
                writer.writeheader()
                writer.writerows(
                    {key: each if isinstance(each, str) else json.dumps(each) for key, each in row.items()}
                    for row in rows
                )
        elif form == "parquet":
            Dataset.from_list(rows).to_parquet(path)
        elif form == "arrow":
            import pyarrow as pa

            table = pa.Table.from_pylist(rows)
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
                out.write_table(table)
        else:
            Dataset.from_list(rows).save_to_disk(path)
        return str(path)

    return make


@pytest.fixture
def read(write, monkeypatch):
    """format, rows -> the rows that are read of the format."""
    import datasets

    def rows_of(form, rows):
        path = write(form, rows)
        if form == "hub":
            saved = datasets.load_from_disk(path)
            monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: saved)
            path = "acme/rows"
        return [row for _, row in read_rows(path, flag="-d")]

    return rows_of


@pytest.fixture(scope="module")
def calling(tokenizer):
    """A tokenizer whose template writes tools and calls."""
    from copy import copy

    made = copy(tokenizer)
    made.chat_template = TEMPLATE
    return made


def trained(rows, tokenizer):
    """The text of each row, and what is trained of it."""
    forms = read_forms([("-d a, line 1", row) for row in rows], "sft").forms
    samples = sft_samples(forms, tokenizer, max_length=100_000).samples
    return [(tokenizer.decode(each.token_ids), tokenizer.decode(each.token_ids[each.loss_mask])) for each in samples]


def call(name, arguments):
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def row_of_call(name, arguments, properties):
    schema = {"name": name, "parameters": {"type": "object", "properties": properties, "required": [*properties]}}
    return {
        "messages": [{"role": "user", "content": "Do it."}, call(name, arguments), {"role": "user", "content": "ok"}],
        "tools": [{"type": "function", "function": schema}],
    }


CALLS = [
    row_of_call("weather", {"city": "Oslo", "when": {"day": "2012-07-15"}}, {"city": {"type": "string"}}),
    row_of_call("add", {"x": 1, "y": 2**60 + 1, "z": None}, {"x": {"type": "integer"}, "y": {"enum": [1, None]}}),
    row_of_call("now", {}, {}),
]


@pytest.mark.parametrize("form", FORMATS)
def test_calls_and_schemas_have_the_keys_of_their_own_row_alone(form, read, calling):
    weather, add, now = trained(read(form, CALLS), calling)
    assert weather[0] == (
        '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": '
        '{"city": {"type": "string"}}, "required": ["city"]}}}\nu:Do it.\n'
        'a:weather{"city": "Oslo", "when": {"day": "2012-07-15"}}\nu:ok\n'
    )
    assert weather[1] == 'weather{"city": "Oslo", "when": {"day": "2012-07-15"}}\n'
    assert add[1] == 'add{"x": 1, "y": 1152921504606846977}\n' and '"enum": [1, null]' in add[0]
    assert now[1] == "now{}\n" and '"properties": {}' in now[0]


_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=4)
_SCALARS = {  # by key, as a column has one type: the values of the other rows must not change those of a row
    "day": st.sampled_from(["2012-07-15", "2013-01-01"]),
    "long": st.integers(-(2**63), 2**63 - 1),
    "said": _TEXT,
    "share": st.floats(allow_nan=False, allow_infinity=False),
    "sure": st.booleans(),
}
_FIELDS = {**_SCALARS, "list": st.lists(st.integers(0, 9), min_size=1, max_size=3)}
_OBJECT = st.fixed_dictionaries({}, optional={key: each | st.none() for key, each in sorted(_FIELDS.items())})
_NESTED = st.tuples(_OBJECT, st.none() | st.fixed_dictionaries({}, optional={"deep": _OBJECT})).map(
    lambda parts: parts[0] if parts[1] is None else {**parts[0], "within": parts[1]}
)
_CONTENT = st.text(st.sampled_from("a é\n☃😀"), min_size=1, max_size=5)


_FULL = {"day": "2000-01-01", "list": [1], "long": 1, "said": "", "share": 0.5, "sure": True}
EVERY = {**_FULL, "within": {"deep": _FULL}}


def as_read(form, rows):
    """Rows as a file of the format gives them, without the file."""
    if form == "json":
        return [*json_values(json.dumps(rows))]
    if form == "csv":
        return [{key: json.dumps(each) for key, each in row.items()} for row in rows]
    import pyarrow as pa
    from datasets import Dataset

    return [*rows_of_dataset(Dataset(pa.Table.from_pylist(rows)) if form == "arrow" else Dataset.from_list(rows))]


@pytest.mark.full
@settings(max_examples=20, deadline=None)
@given(drawn=st.lists(st.tuples(_CONTENT, _NESTED), min_size=1, max_size=3))
def test_rows_of_any_optional_values_give_the_same_tokens_and_masks(calling, drawn):
    drawn = [("all keys", EVERY), *drawn]  # so that a table has the order of keys that each row has
    made = [row_of_call(f"call-{said}", {"x": 1, **arguments}, {"x": {"default": 1}}) for said, arguments in drawn]
    rows = json.loads(json.dumps(made, sort_keys=True))
    expected = trained(rows, calling)
    for form in ("json", "csv", "arrow", "dataset"):
        assert trained(as_read(form, rows), calling) == expected, form


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([9007199254740993, 0.5], ["9007199254740993", "0.5"]),
        ([10**30, 3], [str(10**30), "3"]),
        (["2012-07-15", "2013-01-01"], ["2012-07-15", "2013-01-01"]),
        (["2012-07-15T10:00:00", "2013-01-01T00:00:00"], ["2012-07-15T10:00:00", "2013-01-01T00:00:00"]),
        ([5, "five"], ["5", "five"]),
        (["007", "1.10"], ["007", "1.10"]),
        ([True, {"a": 1}], ["True", "{'a': 1}"]),
    ],
)
def test_an_answer_in_a_json_file_is_what_the_file_says(answers, text, read):
    rows = [{"messages": "1?", "answer": answer} for answer in answers]
    assert [str(row["answer"]) for row in read("json", rows)] == text
    assert read("json", rows) == read("jsonl", rows)


@pytest.mark.parametrize("form", COLUMNS)
def test_dates_of_columns_are_their_text(form, read):
    import datetime

    rows = [
        {
            "day": datetime.date(2012, 7, 15),
            "said": {"on": [datetime.datetime(2013, 1, 1)]},
            "at": datetime.datetime(2013, 1, 1, 9),
        }
    ]
    (row,) = read(form, rows)
    assert (row["day"], row["said"]) == ("2012-07-15", {"on": ["2013-01-01"]})
    assert row["at"] == datetime.datetime(2013, 1, 1, 9), (
        "its text is not known: 2013-01-01 09:00 or 2013-01-01T09:00:00"
    )


def test_times_of_columns_are_refused_in_messages_as_their_text_is_not_known(read):
    import datetime

    rows = [row_of_call("f", {"at": datetime.datetime(2013, 1, 1, 9)}, {"at": {"type": "string"}})]
    with pytest.raises(ConfigError, match=r"line 1: messages holds a datetime, which JSON does not have; write it as"):
        trained(read("parquet", rows), None)


def test_dates_of_a_json_file_that_the_hub_was_given_are_text_again(tmp_path, monkeypatch):
    import datasets

    (tmp_path / "a.jsonl").write_text('{"answer": "2012-07-15"}\n{"answer": "2013-01-01"}\n')
    table = datasets.load_dataset("json", data_files=str(tmp_path / "a.jsonl"), split="train", cache_dir=str(tmp_path))
    assert str(table.features["answer"].dtype).startswith("timestamp")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    assert [row["answer"] for _, row in read_rows("acme/rows", flag="-d")] == ["2012-07-15", "2013-01-01"]


def test_short_floats_of_columns_have_the_shortest_text_of_their_own_width(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    columns = {
        "answer": pa.array([72.3, None, 1e-8, 16777217.0], pa.float32()),
        "half": pa.array([0.1, 2.5, None, 1.0], pa.float16()),
        "double": pa.array([0.1 + 0.2, 72.3, 1.0, None]),
        "within": pa.array([[{"x": 0.7}], None, [], [{"x": None}]], pa.list_(pa.struct({"x": pa.float32()}))),
    }
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    rows = [row for _, row in read_rows(str(tmp_path / "a.parquet"), flag="-d")]
    assert [str(row["answer"]) for row in rows] == ["72.3", "None", "1e-08", "16777216.0"]
    assert [row["half"] for row in rows] == [0.1, 2.5, None, 1.0]
    assert [row["double"] for row in rows] == [0.30000000000000004, 72.3, 1.0, None]
    assert [row["within"] for row in rows] == [[{"x": 0.7}], None, [], [{"x": None}]]


def test_long_integers_of_columns_are_exact(tmp_path):
    import decimal

    import pyarrow as pa
    import pyarrow.parquet as parquet

    long = pa.array([decimal.Decimal(10**30 + 1), None], pa.decimal128(38, 0))
    parquet.write_table(
        pa.table({"long": long, "whole": pa.array([2**64 - 1, 0], pa.uint64())}), tmp_path / "a.parquet"
    )
    rows = [row for _, row in read_rows(str(tmp_path / "a.parquet"), flag="-d")]
    assert rows == [{"long": 10**30 + 1, "whole": 2**64 - 1}, {"long": None, "whole": 0}]


@pytest.mark.parametrize("form", COLUMNS[:-1])
def test_columns_of_mixed_types_keep_each_value(form, write):
    from datasets import Dataset

    rows = [{"a": 5, "m": [{"x": "y"}]}, {"a": "five", "m": [{"x": [1, None]}]}, {"a": 2**60 + 1, "m": []}]
    table = Dataset.from_list(rows, on_mixed_types="use_json")
    path = write("saved", [{"a": 1}]) + f".{form}"
    table.to_parquet(path) if form == "parquet" else table.save_to_disk(path)
    if form == "arrow":
        path += "/data-00000-of-00001.arrow"
    assert [row for _, row in read_rows(path, flag="-d")] == rows
