"""Provide tiny models with random weights for servers of Tinker's API."""

import pytest

from tests.tiny_models import make_writer


@pytest.fixture(scope="session")
def make_model_dir(tmp_path_factory):
    """seed -> the directory of a tiny model with a vocabulary of 512, see `make_writer`."""
    from make_tiny_model import make_tokenizer

    tokenizer = make_tokenizer(["user\nWhat is 4 + 5?", "assistant\n", "It is 9."], vocab_size=512)
    return make_writer(tokenizer, 512, tmp_path_factory)


@pytest.fixture(scope="session")
def model_dir(make_model_dir):
    return make_model_dir()
