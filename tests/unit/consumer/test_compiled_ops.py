"""Test which modules compute by compiled functions, and that they compute what they did."""

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GemmaConfig, GemmaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from coati_rl.ops.compiled import Compiled
from consumer.models import compiled_ops
from consumer.models.compiled_ops import CompiledOps, rms_norm
from consumer.models.float32_compute import Float32Compute
from tests.unit.consumer.test_packed_attention import MODELS, SIZES

CPU = torch.device("cpu")
EAGER = {**SIZES, "attn_implementation": "eager"}
OTHERS: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**EAGER, head_dim=8)),  # a norm by 1 + weight
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**EAGER, pad_token_id=0)),  # gate and up in one product
}


@pytest.fixture(autouse=True)
def of_this_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what is changed for the whole process."""
    monkeypatch.setattr(Compiled, "is_enabled", False)
    caches = compiled_ops._compiled_norm, compiled_ops._compiled_gate, compiled_ops._compiled_rotary
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Call what would be compiled, and note its name."""
    called: list[str] = []

    def instead(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            called.append(function.__name__)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(torch, "compile", instead)
    return called


def compile_ops(model: PreTrainedModel) -> None:
    ops = CompiledOps(model, device=CPU, dtype=model.dtype)
    if ops.are_right():
        ops.use()


def assert_close(found: list[Tensor], right: list[Tensor], tolerance: float) -> None:
    """Norms of whole tensors; sums over tokens may be of another order."""
    for each, expected in zip(found, right, strict=True):
        assert (each - expected).norm() <= tolerance * expected.norm()


def forward_backward(model: PreTrainedModel, num_tokens: int = 15) -> list[Tensor]:
    """Hidden states, and the gradients of all weights."""
    generator = torch.Generator().manual_seed(num_tokens)
    token_ids = torch.randint(0, 40, (1, num_tokens), generator=generator)
    model.zero_grad()
    hidden = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    (hidden * torch.randn(hidden.shape, generator=generator)).sum().backward()
    return [hidden.detach(), *(p.grad.clone() for p in model.base_model.parameters())]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_norms_rotary_embeddings_and_activations_are_compiled(name: str, dtype: torch.dtype, compiled) -> None:
    model = MODELS[name]().to(dtype)
    right = forward_backward(model)
    compile_ops(model)
    compiled.clear()
    assert_close(forward_backward(model), right, {torch.float32: 1e-6, torch.bfloat16: 2e-3}[dtype])
    layers, norms = 2, {"qwen3": 9}.get(name, 5)
    calls = {each: compiled.count(each) for each in set(compiled)}
    forward = {"rms_norm": norms, "gated": layers, "apply_rotary_pos_emb": layers}
    assert calls == forward | {f"{each}_backward": count for each, count in forward.items()}


@pytest.mark.parametrize(
    ("name", "calls"), [("gemma", {"gated", "apply_rotary_pos_emb"}), ("phi3", {"rms_norm", "apply_rotary_pos_emb"})]
)
def test_a_module_that_computes_something_else_stays_as_it_is(name: str, calls: set[str], compiled) -> None:
    model = OTHERS[name]()
    right = forward_backward(model)
    compile_ops(model)
    compiled.clear()
    assert_close(forward_backward(model), right, 1e-6)
    assert set(compiled) == calls | {f"{each}_backward" for each in calls}


class CentredRMSNorm(nn.Module):
    """A norm by 1 + weight, with the attributes of Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, 1 + self.weight, self.variance_epsilon)


def test_a_norm_is_taken_by_what_it_computes(compiled) -> None:
    model = MODELS["llama"]()
    model.base_model.norm = CentredRMSNorm()
    right = forward_backward(model)
    compile_ops(model)
    compiled.clear()
    assert_close(forward_backward(model), right, 1e-6)
    assert compiled.count("rms_norm") == 4


def test_where_nothing_can_be_compiled_the_model_stays_as_it_is(monkeypatch, caplog) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to find C compiler\nand more")

    monkeypatch.setattr(torch, "compile", fail)
    model = MODELS["llama"]()
    right = forward_backward(model)
    with caplog.at_level(logging.WARNING):
        compile_ops(model)
    assert caplog.messages == ["operations are not compiled, which costs time alone: Failed to find C compiler"]
    assert all(map(torch.equal, forward_backward(model), right))
    assert not Compiled.is_enabled


def test_a_compiler_that_computes_something_else_is_not_used(monkeypatch, caplog) -> None:
    def instead(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        is_wrong = not function.__name__.endswith("_backward")
        return lambda *arguments: 1.1 * function(*arguments) if is_wrong else function(*arguments)

    monkeypatch.setattr(torch, "compile", instead)
    model = MODELS["llama"]()
    right = forward_backward(model)
    compile_ops(model)
    assert "rms_norm has other results when it is compiled" in caplog.text
    assert all(map(torch.equal, forward_backward(model), right))


def test_another_model_of_the_class_stays_as_it_is(compiled) -> None:
    model, other = MODELS["qwen3"](), MODELS["qwen3"]()
    compile_ops(model)
    compiled.clear()
    forward_backward(other)
    assert not compiled


def test_what_is_overwritten_and_gradients_are_compared(monkeypatch) -> None:
    def scaled_(values: Tensor) -> Tensor:
        return values.mul_(2)

    def squared(values: Tensor) -> Tensor:
        return values**2

    def instead(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        if function is scaled_:
            return lambda values: values * 2
        return function if function is squared else lambda *_: [torch.ones(3)]

    monkeypatch.setattr(torch, "compile", instead)
    for function, values in ((scaled_, torch.ones(3)), (squared, torch.ones(3, requires_grad=True))):
        with pytest.raises(RuntimeError, match=f"{function.__name__} has other results"):
            Compiled(function, (0,)).check(values)


def test_in_float32_each_operation_is_computed_by_itself(compiled) -> None:
    model = MODELS["qwen3"]().bfloat16()
    compile_ops(model)
    compiled.clear()
    with torch.no_grad(), Float32Compute():
        hidden = model.base_model(input_ids=torch.arange(15)[None], use_cache=False).last_hidden_state
    assert hidden.dtype == torch.float32
    assert not compiled


def test_the_backward_keeps_what_a_function_was_given_whatever_the_compiler_keeps(monkeypatch) -> None:
    def instead(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        calls = itertools.count()

        def call(*arguments: Any, **options: Any) -> Any:  # each call keeps another number of tensors for its backward
            first = arguments[0]
            for _ in range(next(calls) if isinstance(first, Tensor) else 0):
                first = first * torch.ones_like(first)
            return function(first, *arguments[1:], **options)

        return call

    monkeypatch.setattr(torch, "compile", instead)
    model = MODELS["qwen3"]()
    right = forward_backward(model)
    compile_ops(model)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})  # compares what is kept and computed again
    assert_close(forward_backward(model), right, 1e-6)
    kept = list[tuple[int, ...]]()
    hidden, weight = (torch.randn(shape, requires_grad=True) for shape in ((7, 32), (32,)))
    queries, keys = (torch.randn(1, heads, 7, 8, requires_grad=True) for heads in (4, 2))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tuple(tensor.shape)), lambda _: None):
        compiled_ops._compiled_norm()(hidden, weight, 1e-6)
        compiled_ops._compiled_rotary(apply_rotary_pos_emb)(queries, keys, *torch.randn(2, 1, 7, 8))
    assert kept == [(7, 32), (32,), (1, 7, 8), (1, 7, 8)]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-3)])
def test_torch_s_compiler_keeps_the_rounding_for_any_number_of_tokens(dtype: torch.dtype, tolerance: float) -> None:
    model = MODELS["qwen3"]().to(dtype)
    right = {count: forward_backward(model, count) for count in (15, 7, 33)}
    compile_ops(model)
    for is_recomputed in (False, True):
        if is_recomputed:
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
        for count, expected in right.items():
            assert_close(forward_backward(model, count), expected, tolerance)
