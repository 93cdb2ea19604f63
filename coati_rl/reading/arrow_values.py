"""Read the rows of Arrow tables with the values that they would have as JSON.

| column | value |
|---|---|
| float32, float16 | the number whose text is the shortest that has this value: 72.3, not 72.30000305175781 |
| dates; times without a zone that are all at midnight, as loaders of JSON make them of dates | text: 2012-07-15 |
| integers of any length, as decimals without places | the integer |
| JSON as `datasets` keeps it | what it holds |

Keys that only other rows have are null here; what reads a column decides what that means.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from coati_rl.reading.json_text import parse_json

_Convert = Callable[[Any], Any]
_BATCH = 1000  # rows that are converted at a time


def rows_of_dataset(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `datasets.Dataset`. Raises: UnusableJsonError for text of JSON that cannot be used."""
    table = dataset.data
    converts = {
        name: convert
        for name in table.column_names
        if (convert := _converter(table.schema.field(name).type, table.column(name).chunks)) is not None
    }
    for batch in dataset.with_format("arrow").iter(_BATCH):
        for row in batch.to_pylist():
            for name, convert in converts.items():
                row[name] = convert(row[name])
            yield row


def _converter(kind: Any, chunks: Sequence[Any]) -> _Convert | None:
    """Return what converts the values of a type, of which the chunks hold all; None: nothing has to be done."""
    import pyarrow.types as types

    convert: _Convert | None = None
    if types.is_float32(kind) or types.is_float16(kind):
        convert = _shortest(kind)
    elif types.is_date(kind) or (types.is_timestamp(kind) and kind.tz is None and _are_dates(chunks)):
        convert = _date
    elif types.is_decimal(kind) and kind.scale <= 0:
        convert = int
    elif getattr(kind, "extension_name", None) == "arrow.json":
        convert = parse_json
    elif types.is_struct(kind):
        convert = _of_fields(kind, chunks)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        convert = _of_elements(kind, chunks)
    if convert is None:
        return None
    return lambda value: None if value is None else convert(value)


def _shortest(kind: Any) -> _Convert:
    narrow = kind.to_pandas_dtype()
    return lambda value: float(str(narrow(value)))


def _date(value: Any) -> str:
    return str(value.isoformat()[:10])


def _are_dates(chunks: Sequence[Any]) -> bool:
    import pyarrow.compute as compute

    days = [compute.all(compute.equal(compute.floor_temporal(each, unit="day"), each)).as_py() for each in chunks]
    return all(each is not False for each in days)  # None: nothing but nulls


def _of_fields(kind: Any, chunks: Sequence[Any]) -> _Convert | None:
    fields = [each.flatten() for each in chunks]
    converts = {
        kind.field(number).name: convert
        for number in range(kind.num_fields)
        if (convert := _converter(kind.field(number).type, [each[number] for each in fields])) is not None
    }
    if not converts:
        return None
    return lambda value: {key: converts[key](part) if key in converts else part for key, part in value.items()}


def _of_elements(kind: Any, chunks: Sequence[Any]) -> _Convert | None:
    convert = _converter(kind.value_type, [each.flatten() for each in chunks])
    return None if convert is None else lambda value: [convert(part) for part in value]
