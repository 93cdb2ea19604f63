"""Test that responses of the model of scripts/bench/end_to_end.py end with the chosen probability in any context."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "length_model.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("length_model", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_token_is_the_end_with_the_chosen_probability(script):
    tokenizer = script.make_tokenizer()
    model = script.make_model(tokenizer, end_probability=1 / 61, seed=0)
    probabilities = script.end_probabilities(model, tokenizer, script.random_contexts(seed=7))
    assert float(probabilities.mean()) == pytest.approx(1 / 61, rel=0.01)
    assert float((probabilities - 1 / 61).abs().max()) < 0.05 / 61, "the same after every token: lengths are geometric"


@pytest.mark.full
def test_sampled_lengths_are_geometric(script):
    tokenizer = script.make_tokenizer()
    model = script.make_model(tokenizer, end_probability=1 / 10, seed=0)
    torch.manual_seed(0)
    prompts = tokenizer(["12 + 34 = ?"] * 256, return_tensors="pt")
    output = model.generate(**prompts, max_new_tokens=40, do_sample=True, top_k=0)[:, prompts["input_ids"].shape[1] :]
    is_end = output == tokenizer.eos_token_id
    lengths = torch.where(is_end.any(dim=1), is_end.int().argmax(dim=1) + 1, 40)
    # The mean of 256 lengths cut at 40 is 9.85 +- 0.56, the share of those above 10 is 0.9 ** 10 = 0.349 +- 0.030.
    assert float(lengths.float().mean()) == pytest.approx(9.85, abs=2.5)
    assert float((lengths > 10).float().mean()) == pytest.approx(0.349, abs=0.13)


def test_a_model_for_uniform_lengths_never_ends_and_draws_no_special_token(script):
    tokenizer = script.make_tokenizer()
    model = script.make_model(tokenizer, end_probability=0.0, seed=0)
    token_ids = script.random_contexts(seed=7)
    with torch.no_grad():
        special = model(input_ids=token_ids).logits.softmax(dim=-1)[..., 256:]
    assert special.shape[-1] == 3
    assert float(special.max()) < 1e-12


def test_all_prompts_have_one_length_and_their_answer(script):
    tokenizer = script.make_tokenizer()
    rows = script.prompt_rows(5, seed=0)
    assert {len(tokenizer(row["messages"]["content"])["input_ids"]) for row in rows} == {11}
    first = rows[0]["messages"]["content"]
    assert rows[0]["gt_answer"] == str(sum(int(number) for number in first.removesuffix(" = ?").split(" + ")))
