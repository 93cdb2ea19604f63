"""Write files of rows, and use a fixture of tests/unit/groups.py here."""

import json

import pytest

from tests.unit.groups import make_prompts

__all__ = ["make_prompts", "write"]


@pytest.fixture
def write(tmp_path):
    """Name and rows -> the path of a file in the format that the name ends in; Arrow streams by any other name."""

    def write_rows(name, rows):
        import pyarrow as pa
        import pyarrow.parquet as pq
        from datasets import Dataset

        path = tmp_path / name
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows), encoding="utf-8")
        elif path.suffix == ".csv":
            flat = [{k: json.dumps(v) if isinstance(v, dict | list) else v for k, v in row.items()} for row in rows]
            Dataset.from_list(flat).to_csv(path)
        elif path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            table = pa.Table.from_pylist(rows)
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        return str(path)

    return write_rows
