"""Import TRL without what takes it seconds and its losses do not use."""

import importlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock


@contextmanager
def importing_trl() -> Iterator[None]:
    """Hide vLLM and wandb, which TRL's trainers load; drop the environment variables that it sets."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, TRL_EXPERIMENTAL_SILENCE="1"))
        for module, name in (
            ("trl.import_utils", "is_vllm_available"),
            ("accelerate.utils", "is_wandb_available"),
            ("transformers", "is_wandb_available"),
            ("transformers.integrations", "is_wandb_available"),
        ):
            stack.enter_context(mock.patch.object(importlib.import_module(module), name, return_value=False))
        yield
