"""Write the files of small tokenizers in the forms in which models have them."""

import base64
import io
import json
from pathlib import Path

import sentencepiece

from tests.unit.producer.chat_families import family_tokenizer, template_text

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}assistant: {% endif %}"
TEKKEN_SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)


def with_named_templates(directory: Path) -> None:
    tokenizer = family_tokenizer("qwen3")
    tokenizer.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(PLAIN)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates/tool_use.jinja").write_text(template_text("qwen3"))


def with_templates_in_its_config(directory: Path) -> None:
    family_tokenizer("qwen3").save_pretrained(directory)
    (directory / "chat_template.jinja").unlink()
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    named = {"default": PLAIN, "tool_use": template_text("qwen3")}
    settings["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def with_vocabulary_and_merges(directory: Path) -> None:
    family_tokenizer("qwen3").save_pretrained(directory)
    whole = json.loads((directory / "tokenizer.json").read_text())
    (directory / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in whole["model"]["merges"]]
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]) + "\n")
    (directory / "tokenizer.json").unlink()
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "Qwen2Tokenizer"}))
    added = {token["content"]: token["id"] for token in whole["added_tokens"]}
    (directory / "added_tokens.json").write_text(json.dumps(added))


def with_sentencepiece(directory: Path) -> None:
    """As Llama 2's: tokenizer.model, which transformers converts, and a template in the settings."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["What is 1 + 1? The answer is two, and 1 + 2 is three."] * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        minloglevel=2,
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    template = PLAIN.replace("<|im_end|>", "</s>").replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))


def with_tekken(directory: Path) -> None:
    """Mistral's own format, without any other file."""
    texts = [bytes([i]) for i in range(256)] + [b" +", b"Two", b" =", b" 1", b"add"]
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(text).decode(), "token_str": text.decode(errors="replace")}
        for i, text in enumerate(texts)
    ]
    specials = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(TEKKEN_SPECIAL.split())]
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    config = {
        "pattern": pattern,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(vocab) + len(specials),
        "default_num_special_tokens": len(specials),
        "version": "v3",
    }
    settings = {"config": config, "vocab": vocab, "special_tokens": specials}
    (directory / "tekken.json").write_text(json.dumps(settings))


KINDS = {
    "named templates": with_named_templates,
    "templates in its config": with_templates_in_its_config,
    "vocabulary and merges": with_vocabulary_and_merges,
    "sentencepiece": with_sentencepiece,
    "tekken": with_tekken,
}
