"""Create tiny Qwen3 checkpoints with random weights when a test needs them.

Their logits are scaled so that distributions are peaked (mean log-probability about -2), which is where two
implementations of one model differ most; the embeddings are tied or not, and each has a second version of its weights.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.integration.engines.engine_process import hosted_engine
from tests.integration.engines.harness import MAX_MODEL_LEN, MAX_NUM_SEQS, Harness
from tests.integration.engines.sglang_server import sglang_server
from tests.integration.engines.vllm_server import vllm_server

VOCAB_SIZE = 320
EOS_TOKEN = "<|endoftext|>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, without an unknown token: 256 bytes, two special tokens, merges of two letters for the rest."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = "abcdefghijkl"
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS_TOKEN, "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(a + b for a in letters for b in letters)] * 2, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN, pad_token="<|pad|>")


def make_model(seed: int, *, tied: bool) -> Qwen3ForCausalLM:
    """Two layers of width 64 with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        eos_token_id=0,
        pad_token_id=1,
        initializer_range=0.15,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    model.generation_config.eos_token_id = 0
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0)
    return model


def save_checkpoint(directory: Path, seed: int, *, tied: bool) -> Path:
    """A complete checkpoint with tokenizer."""
    make_model(seed, tied=tied).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


Checkpoints = dict[str, tuple[Path, Path]]  # two versions of a model, "tied" or "untied"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    root = tmp_path_factory.mktemp("models")
    return {
        model: tuple(save_checkpoint(root / f"{model}{seed}", seed, tied=model == "tied") for seed in (0, 1))
        for model in ("tied", "untied")
    }


ENGINES = [
    ("vllm", "tied"),
    pytest.param(("vllm", "untied"), marks=pytest.mark.full),
    ("transformers", "untied"),
    pytest.param(("transformers", "tied"), marks=pytest.mark.full),
    ("fake", "tied"),
    pytest.param(("fake", "untied"), marks=pytest.mark.full),
    pytest.param(("server", "untied"), marks=pytest.mark.full),
    pytest.param(("server", "tied"), marks=pytest.mark.full),  # with this project's loader, see `check_server`
    pytest.param(("sglang", "tied"), marks=pytest.mark.full),
]


@pytest.fixture(scope="session", params=ENGINES, ids="-".join)
def harness(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Harness]:
    """One engine of each kind and model, for all tests that leave it without a request; of whatever version then."""
    backend, model = request.param
    settings = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "policy_version": -1}
    with ExitStack() as stack:
        if backend in ("server", "sglang"):
            folder = tmp_path_factory.mktemp("server")
            if backend == "sglang":
                started = sglang_server(checkpoints[model][0], folder / "log", max_model_len=MAX_MODEL_LEN)
            else:
                started = vllm_server(checkpoints[model][0], folder / "log", has_loader=model == "tied")
            backend, settings["weights_dir"] = stack.enter_context(started).url, str(folder / "weights")
        engine = stack.enter_context(hosted_engine(backend, model=str(checkpoints[model][0]), **settings))
        harness = Harness(engine, checkpoints[model])
        harness.has_model = backend != "fake"
        harness.commit_first(range(40, 60))
        yield harness
        harness.sender.close()


@pytest.fixture
def model_harness(harness: Harness) -> Harness:
    """For tests that the fake engine, having no model, is left out of."""
    return harness


@pytest.fixture
def stepwise_harness(harness: Harness) -> Harness:
    """For tests that depend on the engine's own steps and queue; a server has its own, where a probe waits its turn."""
    return harness


@pytest.fixture
def seeds_and_cuts() -> None:
    """For tests of seeds, and of cuts and penalties as ours are; SGLang has them in part, seeds on GPUs alone."""


_WITHOUT = {  # the backends that are left out of a fixture's tests
    "model_harness": ("fake",),
    "stepwise_harness": ("server", "sglang"),
    "seeds_and_cuts": ("sglang",),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave backends out where what is tested is not there: deselected, since there is nothing to run, not skipped."""

    def is_left_out(item: pytest.Item) -> bool:
        of_item = getattr(getattr(item, "callspec", None), "params", {}).get("harness", ())
        names = getattr(item, "fixturenames", ())
        return any(name in names and backend in of_item for name, backends in _WITHOUT.items() for backend in backends)

    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]
