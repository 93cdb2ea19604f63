"""Read the files of a model's tokenizer, and of its processor of images, which each checkpoint holds byte for byte.

Their names are not listed: tokenizers have vocabularies, merges and templates of many names. Everything in the model's
directory belongs to the tokenizer that is neither weights, configuration, program, document or data.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from coati_rl.checkpoint.directory import MANIFEST_FILE, STATE_FILE

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES_DIR = "additional_chat_templates"  # further templates by name, "tool_use" among them
OF_PROCESSOR = "processor_config.json"  # how the names of a processor's settings end
OLD_TEMPLATE_FILE = "chat_template.json"  # which a processor takes before the other one
MAX_BYTES = 2**27  # of a file; Gemma 3's tokenizer.json has 33 MB

# Weights, archives; programs; documents, pictures; rows and records of other programs.
_OTHER_KINDS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|gguf|ggml|h5|msgpack|onnx|npz|npy|pkl|pickle|tflite|ot|pdparams|zip|gz|tar|xz"
    r"|py|pyc|so|sh|ipynb|md|pdf|html|log|png|jpg|jpeg|gif|svg|webp|jsonl|parquet|arrow|csv|tsv|yaml|yml|toml|lock)"
)
# config.json, generation_config.json, adapter_config.json, Mistral's params.json; not tokenizer_config.json, and not a
# processor's, without which vLLM and transformers do not start a model that also takes images.
_OTHER_NAMES = re.compile(
    r"(?!tokenizer_config|.*processor_config).*config\.json|.*index\.json|params\.json|.*(state|results|args)\.json"
)


def tokenizer_files(directory: Path) -> list[str]:
    """Return the names of the files, relative to a model's directory, in order."""
    files = [path for path in directory.iterdir() if path.is_file() and _is_of_tokenizer(path)]
    files += (directory / TEMPLATES_DIR).glob("*.jinja")
    return sorted(path.relative_to(directory).as_posix() for path in files)


def read_tokenizer_files(directory: Path, *, chat_template: str | None = None) -> dict[str, bytes]:
    """Return the contents of the files by name.

    Args:
        directory: of the model.
        chat_template: of --chat-template, in place of all templates of the model's.
    """
    files = {name: (directory / name).read_bytes() for name in tokenizer_files(directory)}
    if chat_template is not None:
        files = {name: content for name, content in files.items() if not is_template(name)}
        files[TEMPLATE_FILE] = chat_template.encode()
    return files


def is_template(name: str) -> bool:
    """Return True of the name of a file that holds a chat template."""
    return name in (TEMPLATE_FILE, OLD_TEMPLATE_FILE) or name.startswith(f"{TEMPLATES_DIR}/")


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write contents by name; a name may be in a subdirectory."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


def _is_of_tokenizer(path: Path) -> bool:
    name = path.name.lower()
    return (
        bool(path.suffix)
        and not name.startswith(".")
        and not _OTHER_KINDS.fullmatch(name)
        and path.name not in (MANIFEST_FILE, STATE_FILE)
        and not _OTHER_NAMES.fullmatch(name)
        and path.stat().st_size <= MAX_BYTES
    )
