"""Test that what libyaml does not take is read and written all the same, and that all else is PyYAML's own text."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from coati_rl.yaml_text import parse_yaml, to_yaml

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.full
@given(VALUES)
def test_any_value_comes_back_from_the_text_and_from_that_of_pyyaml(value):
    assert parse_yaml(to_yaml(value)) == parse_yaml(yaml.safe_dump(value)) == yaml.safe_load(to_yaml(value)) == value


@pytest.mark.parametrize("value", [{"model": "caf\udce9"}, {"stop": ["\ud83e"]}])
def test_halves_of_characters_are_kept_as_names_of_files_may_have_them(value):
    assert parse_yaml(to_yaml(value)) == parse_yaml(yaml.safe_dump(value)) == value


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "\x00"])
def test_what_is_no_yaml_is_refused(text):
    with pytest.raises(yaml.YAMLError):
        parse_yaml(text)
