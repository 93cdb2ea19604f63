"""Test what one pipeline stage takes from another: descriptions of tensors, and no code."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from coati_rl.errors import EngineError
from consumer.parallel.pipeline_messages import read_message

# torch 2.13 says so of the tree that ColossalAI describes a stage's output by.
pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data + b"padding"), dtype=torch.uint8)


class Command:
    """A pickle of it runs a command when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_description_of_a_stages_output_arrives(dtype: torch.dtype) -> None:
    from colossalai.pipeline import p2p

    sent = p2p.create_send_metadata({"hidden_states": torch.zeros(2, 3, dtype=dtype), "mask": None}, strict=False)
    data = pickle.dumps(sent)
    assert read_message(as_tensor(data), len(data)) == sent


def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    data = pickle.dumps(Command(tmp_path / "made"))
    with pytest.raises(EngineError, match=r"no stage sends: it names (os|posix)\.mkdir"):
        read_message(as_tensor(data), len(data))
    assert not (tmp_path / "made").exists()


def test_colossalai_reads_its_messages_with_it() -> None:
    from consumer.parallel import colossal_compat

    colossal_compat.install()
    from colossalai.pipeline import p2p

    assert p2p._cuda_safe_tensor_to_object is read_message
