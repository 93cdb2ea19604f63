"""Lines and their places, whichever line ends a file has; rows are the same with and without --streaming."""

import io
import json

import pytest

from coati_rl.errors import ConfigError
from coati_rl.reading import lines
from coati_rl.reading.files import read_rows
from coati_rl.reading.lines import line_at, lines_of
from coati_rl.reading.streamed_rows import StreamedRows

ROWS = [json.dumps({"a": text}, ensure_ascii=False) for text in ("x", "y\u2028z", "\u0085", "\x0b😀", "é" * 9000)]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("begin", ["", "\ufeff", "\r\r\n \n"])
@pytest.mark.parametrize("last", ["", "end"])
def test_streamed_rows_are_those_of_the_file(end, begin, last, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes((begin + end.join(ROWS) + (end if last else "")).encode())
    read = read_rows(str(path), flag="-d")
    assert [row["a"] for _, row in read] == ["x", "y\u2028z", "\u0085", "\x0b😀", "é" * 9000]
    streamed = StreamedRows(str(path), flag="-d", read=lambda where, row: (where, row))
    assert [streamed[number] for number in range(len(streamed))] == read


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
def test_lines_do_not_depend_on_the_blocks_that_are_read(block, monkeypatch):
    monkeypatch.setattr(lines, "_BLOCK", block)
    monkeypatch.setattr(lines, "_PIECE", block)
    text = b"\xef\xbb\xbfab\r\n\r\rc\n\n\r\nd"
    found = [*lines_of(io.BytesIO(text))]
    assert found == [(3, b"ab\r\n"), (7, b"\r"), (8, b"\r"), (9, b"c\n"), (11, b"\n"), (12, b"\r\n"), (14, b"d")]
    assert [line_at(io.BytesIO(text), offset) for offset, _ in found] == [line.rstrip() for _, line in found]


def test_text_in_another_encoding_is_named_by_its_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\r{"a": "caf\xe9"}\r')
    for read in (
        lambda: read_rows(str(path), flag="-d"),
        lambda: StreamedRows(str(path), flag="-d", read=lambda where, row: (where, row)),
    ):
        with pytest.raises(ConfigError, match=rf"^-d {path}, line 2: is not UTF-8 text"):
            read()
