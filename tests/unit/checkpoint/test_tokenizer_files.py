"""Test which files of a model's directory are its tokenizer's, and that checkpoints hold them unchanged."""

import pytest

from coati_rl.checkpoint import tokenizer_files as module
from coati_rl.checkpoint.tokenizer_files import read_tokenizer_files, tokenizer_files, write_files

OF_TOKENIZER = (
    "added_tokens.json",
    "additional_chat_templates/rag.jinja",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "qwen.tiktoken",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.bpe",
    "vocab.json",
    "vocab.txt",
)
OTHERS = (
    ".gitattributes",
    "LICENSE",
    "README.md",
    "adapter_config.json",
    "adapter_model.bin",
    "config.json",
    "consolidated.safetensors",
    "generation_config.json",
    "manifest.json",
    "model.gguf",
    "model.safetensors",
    "model.safetensors.index.json",
    "modeling_own.py",
    "optimizer.safetensors",
    "params.json",
    "rollouts.npz",
    "scheduler.pt",
    "state.json",
    "tokenization_own.py",
    "train.jsonl",
    "trainer_state.json",
    "original/tokenizer.model",
)


@pytest.fixture
def directory(tmp_path):
    """A directory with a file of each name, which holds its name."""
    for name in (*OF_TOKENIZER, *OTHERS):
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "model"


def test_all_that_is_neither_weights_configuration_program_nor_data_is_the_tokenizers_or_processors(directory):
    assert tuple(tokenizer_files(directory)) == tuple(sorted(OF_TOKENIZER))


def test_the_files_are_written_as_they_were(directory, tmp_path):
    saved = tmp_path / "saved"
    saved.mkdir()
    write_files(saved, read_tokenizer_files(directory))
    assert {name: (saved / name).read_text() for name in OF_TOKENIZER} == {name: name for name in OF_TOKENIZER}
    assert tokenizer_files(saved) == tokenizer_files(directory)


def test_the_template_of_the_flag_is_in_place_of_all_others(directory):
    files = read_tokenizer_files(directory, chat_template="{{ ä }}")
    assert files["chat_template.jinja"] == "{{ ä }}".encode()
    others = {"chat_template.json", "additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja"}
    assert set(files) == set(OF_TOKENIZER) - others


def test_a_file_too_large_for_a_tokenizer_is_none_of_its_own(directory, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", len("tokenizer.json"))
    assert "tokenizer.json" in tokenizer_files(directory)
    assert "tokenizer.model.v3" not in tokenizer_files(directory)
