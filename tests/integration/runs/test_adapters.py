"""Test runs that train adapters as users start them: a kill, and the same bits after it; PEFT reads them."""

import peft
import pytest
from transformers import AutoModelForCausalLM

from tests.integration.runs.resuming import assert_goes_on_bit_for_bit
from tests.integration.runs.test_actor_critic import LAYOUTS
from tests.integration.runs.test_offline import tensors

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]
LORA = ("--lora-rank", 4, "-lr", 1e-2)
FILES = {"adapter_model.safetensors", "optimizer.safetensors"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ["PPO", "GRPO"])
def test_a_killed_run_goes_on_with_its_adapters(make_tiny, start_run, flags, algorithm, layout):
    model, has_critic = make_tiny(tied=True), algorithm == "PPO"
    job = (*flags(model), "-a", algorithm, "-kl", 0.01, *LORA, *LAYOUTS[layout], "-si", 1, "--max-steps", 4)
    keys = ("value_loss", "kl_mean", "grad_norm") if has_critic else ("loss", "kl_mean", "grad_norm")
    places = (4, "4/value") if has_critic else (4,)
    whole = assert_goes_on_bit_for_bit(start_run, job, places=places, keys=keys)
    for place in places:
        assert tensors(whole, place).keys() == FILES
    base = AutoModelForCausalLM.from_pretrained(model)
    peft.PeftModel.from_pretrained(base, whole.run_dir / "checkpoints" / "step-4")
