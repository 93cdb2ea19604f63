"""Write rows for the tests of what reads them."""

import json

import pytest


@pytest.fixture
def write(tmp_path):
    """(name, rows) -> the path of a JSONL file."""

    def make(name, *rows):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"{tmp_path}/{name}.jsonl"

    return make
