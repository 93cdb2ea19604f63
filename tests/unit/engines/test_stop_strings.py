"""Test when a stop string ends a response, and the text of the response."""

import pytest

from producer.engines.stop_strings import ends_with_stop, final_text

PIECES = ["", "ab", "c", "</", "answer", "> tail", "é"]  # token id -> text; 0 is a special token


def decode(token_ids) -> str:
    return "".join(PIECES[token] for token in token_ids)


@pytest.mark.parametrize(
    ("token_ids", "stop", "expected"),
    [
        ([1, 2], ("bc",), True),
        ([1, 2], ("ca",), False),
        ([3, 4], ("</answer>",), False),
        ([3, 4, 5], ("</answer>",), True),
        ([3, 4, 5], ("zzz", "</answer>"), True),
        ([1, 6], ("é",), True),
        ([1, 0, 0, 0, 2], ("bc",), True),
        ([1, 2], (), False),
    ],
)
def test_the_token_that_completes_a_stop_string_ends_the_response(token_ids, stop, expected):
    assert ends_with_stop(token_ids, stop, decode) is expected


def test_a_long_response_is_looked_at_from_its_end():
    assert ends_with_stop([2] * 1000 + [3, 4, 5], ("</answer>",), decode)
    assert not ends_with_stop([3, 4, 5] + [2] * 1000, ("</answer>",), decode)


def test_the_text_ends_with_the_first_stop_string():
    assert final_text([1, 3, 4, 5], ("</answer>",), decode) == "ab</answer>"
    assert final_text([1, 2, 3, 4, 5], ("</answer>", "bc"), decode) == "abc"
    assert final_text([1, 2], ("zzz",), decode) == "abc"
    assert final_text([1, 2], (), decode) == "abc"
