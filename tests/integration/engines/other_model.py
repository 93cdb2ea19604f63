"""Ask a real server to be another model's, which is refused before anything starts."""

from pathlib import Path

import pytest

from coati_rl.errors import ConfigError
from producer.engines.served.identity import check_server
from producer.engines.served.server import Server
from tests.integration.runs.conftest import make_model_of_a_run


def refusal_of_another_model(url: str, model: Path, directory: Path) -> str:
    """Check that the server of `model` is refused in another precision, and return why it is not that of another one.

    The other one has 512 tokens in its vocabulary, a tokenizer of its own, and longer sequences.
    """
    other = make_model_of_a_run(directory / "other", tied=False, writes_programs=False, obeys=False, num_experts=0)
    asker = Server(url)
    with pytest.raises(ConfigError) as caught:
        check_server(asker, other, dtype="float32", max_model_len=512, timeout_s=10.0)
    with pytest.raises(ConfigError, match="it computes in float32, the run in bfloat16"):
        check_server(asker, model, dtype="bfloat16", max_model_len=256, timeout_s=10.0)
    asker.close()
    return str(caught.value)
