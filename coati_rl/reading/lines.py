"""Read the lines of a file with the place of each, whichever line ends it has: LF, CR LF, or CR alone.

JSON writes no line end within a text, so that each of the three ends a row. What is in memory is a block and a line.
"""

from collections.abc import Iterator
from typing import BinaryIO

_BLOCK = 1 << 20  # bytes of a first pass
_PIECE = 1 << 13  # bytes that one line is read by
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def lines_of(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the offset of each line and the line with its end, without a byte order mark."""
    offset = len(_BYTE_ORDER_MARK) if file.read(len(_BYTE_ORDER_MARK)) == _BYTE_ORDER_MARK else 0
    file.seek(offset)
    rest = b""
    while block := file.read(_BLOCK):
        while block.endswith(b"\r") and (more := file.read(1)):  # its LF may be the next byte
            block += more
        lines = (rest + block).splitlines(keepends=True)
        rest = b"" if lines[-1].endswith((b"\n", b"\r")) else lines.pop()
        for line in lines:
            yield offset, line
            offset += len(line)
    if rest:
        yield offset, rest


def line_at(file: BinaryIO, offset: int) -> bytes:
    """Return the line that begins at an offset, without its end."""
    file.seek(offset)
    read = bytearray()
    while piece := file.read(_PIECE):
        read += piece
        if b"\n" in piece or b"\r" in piece:
            break
    return bytes(read.splitlines()[0]) if read else b""
