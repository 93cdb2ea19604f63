"""Test which parameters AdamW's weight decay acts on: transformers' rule, by name on the whole model."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from coati_rl.config.optimizer import OptimizerConfig
from consumer.optim.optimizer import make_optimizer
from consumer.optim.weight_decay import names_without_decay
from tests.unit.consumer.conftest import SIZES
from tests.unit.consumer.test_saved_buffers import GEMMA_3

LAYER = "model.layers.0."
EXEMPT = {
    "llama": {f"{LAYER}input_layernorm.weight", f"{LAYER}post_attention_layernorm.weight", "model.norm.weight"},
    "qwen2": {
        *(f"{LAYER}self_attn.{each}_proj.bias" for each in "qkv"),
        *(f"{LAYER}{each}.weight" for each in ("input_layernorm", "post_attention_layernorm")),
        "model.norm.weight",
    },
    # By type: no pattern has the names ln_1 and ln_f.
    "gpt2": {
        *(f"transformer.h.0.{each}.{kind}" for each in ("ln_1", "ln_2") for kind in ("weight", "bias")),
        *(f"transformer.h.0.{each}.bias" for each in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    },
    # A norm of each head is a matrix.
    "cohere": {
        *(f"{LAYER}self_attn.{each}_norm.weight" for each in "qk"),
        f"{LAYER}input_layernorm.weight",
        "model.norm.weight",
    },
}
SETTINGS = {"gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2}, "cohere": {"use_qk_norm": True, "pad_token_id": 0}}
EVERY = (
    "llama",
    "qwen2",
    "qwen3",
    "gpt2",
    "cohere",
    "gemma3_text",
    "olmo2",
    "phi",
    "opt",
    "mamba",
    "gpt_neox",
    "apertus",
)


def model_of(model_type: str) -> nn.Module:
    settings = SETTINGS.get(model_type, {})
    config = AutoConfig.for_model(model_type, **{**SIZES, "num_hidden_layers": 1, **settings})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("model_type", EXEMPT)
def test_norms_and_biases_are_exempt_by_name_and_by_type(model_type: str) -> None:
    assert names_without_decay(model_of(model_type)) == EXEMPT[model_type]


def test_what_text_gives_no_gradient_does_not_decay() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3", **GEMMA_3))
    text = model.model.language_model
    of_text = {f"model.language_model.{name}" for name in names_without_decay(text)}
    others = {name for name, _ in model.named_parameters() if not name.startswith("model.language_model.")}
    assert "model.multi_modal_projector.mm_input_projection_weight" in others
    assert names_without_decay(model) == of_text | others


@pytest.mark.full
@pytest.mark.parametrize("model_type", EVERY)
def test_all_others_are_those_that_transformers_decays(model_type: str) -> None:
    from transformers import Trainer  # takes seconds

    model = model_of(model_type)
    decayed = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    names = {name for name, _ in model.named_parameters()}
    assert names - names_without_decay(model) == names & {*decayed}


def stepped(config: OptimizerConfig) -> dict[str, float]:
    """Two parameters of 1 after a step at learning rate 0.1 whose gradient is 0: only weight decay moves them."""
    parameters: dict[str, Tensor] = {
        "proj.weight": torch.ones(2, 2, requires_grad=True),
        "norm.weight": torch.ones(2, requires_grad=True),
    }
    optimizer = make_optimizer(parameters, config, without_decay={"norm.weight"})
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert [p for group in optimizer.param_groups for p in group["params"]] == [*parameters.values()]
    return {name: parameter.mean().item() for name, parameter in parameters.items()}


def test_norms_and_biases_do_not_decay_unless_none_is_exempt() -> None:
    assert stepped(OptimizerConfig(weight_decay=0.5)) == pytest.approx({"proj.weight": 0.95, "norm.weight": 1.0})
    all_decay = OptimizerConfig(weight_decay=0.5, weight_decay_exempt="none")
    assert stepped(all_decay) == pytest.approx({"proj.weight": 0.95, "norm.weight": 0.95})


def test_a_model_without_norms_has_one_group() -> None:
    parameters = {"weight": torch.ones(2, 2, requires_grad=True)}
    assert len(make_optimizer(parameters, OptimizerConfig()).param_groups) == 1
