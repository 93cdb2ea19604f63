"""Test engines of a model whose config.json says that its LM head is the embedding, and whose file has a head too."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.integration.engines.conftest import save_checkpoint
from tests.integration.engines.engine_process import hosted_engine
from tests.integration.engines.harness import MAX_MODEL_LEN, Harness

PROMPT = tuple(range(40, 60))
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FACTORS = {"a copy of the embedding": 1.0, "another head": 0.7}

pytestmark = pytest.mark.full


def add_head(directory: Path, factor: float) -> Path:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, HEAD: tensors[EMBEDDING] * factor}, file, {"format": "pt"})
    return directory


@pytest.fixture(scope="module", params=FACTORS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    root = tmp_path_factory.mktemp("heads")
    return tuple(add_head(save_checkpoint(root / f"{i}", i, tied=True), FACTORS[request.param]) for i in (0, 1))


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def harness(request: pytest.FixtureRequest, models: tuple[Path, Path]) -> Iterator[Harness]:
    settings = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16}
    with hosted_engine(request.param, model=str(models[0]), **settings) as engine:
        harness = Harness(engine, models)
        yield harness
        harness.sender.close()


def test_every_sync_serves_the_head_that_transformers_has(harness) -> None:
    assert harness.probe_gap(PROMPT) < 1e-4
    for checkpoint in (1, 0, 1):
        harness.sync(checkpoint)
        assert harness.probe_gap(PROMPT) < 1e-4
        for sample in harness.complete(PROMPT, num_samples=4, temperature=0.7, seed=3):
            assert harness.logprob_gap(PROMPT, sample, temperature=0.7) < 1e-4
