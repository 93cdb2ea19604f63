"""Text of tokens as they come: whole characters, no part of a stop string, and in sum the text of all tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producer.gateway.text_stream import TextStream


def decode(token_ids) -> str:
    """Bytes as tokens."""
    return bytes(token_ids).decode("utf-8", errors="replace")


def pieces(text: str, stop=(), size: int = 1) -> list[str]:
    stream, ids = TextStream(decode, stop), list(text.encode())
    found = [stream.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    return [*found, stream.finish(ids)]


def test_a_character_of_several_tokens_is_given_out_whole() -> None:
    assert pieces("aé🙂b") == ["a", "", "é", "", "", "", "🙂", "b", ""]


def test_an_unfinished_character_at_the_end_is_what_its_bytes_decode_to() -> None:
    stream = TextStream(decode)
    assert [stream.push([0x61, 0xC3]), stream.finish([0x61, 0xC3])] == ["", "a\ufffd"]


def test_what_may_be_a_stop_string_is_held_until_it_is_known() -> None:
    assert pieces("a<b<e", ("<e>",)) == ["a", "", "<b", "", "", "<e"]
    assert pieces("a<e>b", ("<e>",)) == ["a", "", "", "", "", ""]


@pytest.mark.parametrize("size", [1, 2, 7])
def test_the_first_of_several_stop_strings_counts(size) -> None:
    assert "".join(pieces("one two three", ("three", "two"), size)) == "one "


def before_the_stop(text, stop, size) -> str:
    """What comes before a stop string, at the first step after which one is there."""
    data = text.encode()
    for at in range(size, len(data), size):
        try:
            seen = data[:at].decode()
        except UnicodeDecodeError:  # it ends inside a character
            continue
        if ends := [seen.index(mark) for mark in stop if mark in seen]:
            return seen[: min(ends)]
    return text[: min([text.index(mark) for mark in stop if mark in text], default=len(text))]


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab<é🙂", max_size=12),
    stop=st.lists(st.text(alphabet="ab<é", min_size=1, max_size=3), max_size=2),
    size=st.integers(1, 4),
)
def test_the_pieces_add_up_to_the_text_before_the_first_stop_string(text, stop, size) -> None:
    assert "".join(pieces(text, stop, size)) == before_the_stop(text, stop, size)


def test_an_answer_ends_with_the_stop_string_that_is_whole_first() -> None:
    assert "".join(pieces("a<<", ("<", "a<<"))) == "a", "the engine samples nothing after this"
    assert "".join(pieces("a<<", ("<", "a<<"), size=3)) == ""
