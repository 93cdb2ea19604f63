"""Test products by oneDNN against float64, on any processor, and where they take the place of torch's."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coati_rl.ops import cpu_products
from coati_rl.ops.cpu_products import PRODUCT_BLOCK, add_product, linear_into, product, use_fast_products

TOLERANCE = 2e-6  # of the largest entry; sums of 64 to 4,096 terms in float32


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have oneDNN preferred on every processor."""
    monkeypatch.setattr(cpu_products, "_onednn_is_faster", lambda: True)


@pytest.fixture
def no_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a call of oneDNN fail."""

    def fail(*_: object) -> Tensor:
        raise AssertionError("oneDNN was called")

    monkeypatch.setattr(cpu_products, "_onednn_linear", fail)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def assert_close(found: Tensor, exact: Tensor) -> None:
    assert found.dtype == torch.float32
    assert found.shape == exact.shape
    found, exact = found.detach().double(), exact.detach()
    assert float((found - exact).abs().max() / exact.abs().max()) < TOLERANCE


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda matrix: matrix,
    "transposed": lambda matrix: matrix.T.contiguous().T,
    "columns of a wider one": lambda matrix: torch.cat([matrix, matrix], dim=1)[:, : matrix.shape[1]],
    "one row, expanded": lambda matrix: matrix[:1].expand(len(matrix), -1),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("left_layout", LAYOUTS)
@pytest.mark.parametrize("right_layout", LAYOUTS)
def test_a_product_is_that_of_float64_in_every_memory_layout(onednn: None, left_layout: str, right_layout: str) -> None:
    left, right = LAYOUTS[left_layout](drawn(300, 64)), LAYOUTS[right_layout](drawn(64, 130))
    assert_close(product(left, right), left.double() @ right.double())


@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_of_several_blocks_fill_the_given_memory(onednn: None, has_bias: bool) -> None:
    num_columns = 2 * PRODUCT_BLOCK + 5
    rows, weight, bias = drawn(30, 64), drawn(num_columns, 64), drawn(num_columns) if has_bias else None
    out = torch.full((30, num_columns), torch.nan)
    assert linear_into(out, rows, weight, bias) is out
    assert_close(out, F.linear(rows.double(), weight.double(), None if bias is None else bias.double()))


def test_products_are_added_in_blocks_or_fill_what_was_there(onednn: None) -> None:
    left, right = drawn(70, 2 * PRODUCT_BLOCK + 5).T, drawn(70, 64)
    total = torch.full((2 * PRODUCT_BLOCK + 5, 64), torch.nan)
    add_product(total, left, right, fills=True)
    assert_close(total, left.double() @ right.double())
    add_product(total, left, right, fills=False)
    assert_close(total, 2 * left.double() @ right.double())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(200, 96), (2, 100, 96)])
def test_a_layer_has_the_value_and_gradients_of_float64(onednn: None, has_bias: bool, shape: tuple[int, ...]) -> None:
    layer = nn.Linear(96, 128, bias=has_bias)
    exact = nn.Linear(96, 128, bias=has_bias, dtype=torch.float64)
    exact.load_state_dict({name: tensor.double() for name, tensor in layer.state_dict().items()})
    use_fast_products(layer)
    inputs = drawn(*shape).requires_grad_()
    exact_inputs = inputs.detach().double().requires_grad_()
    upstream = drawn(*shape[:-1], 128)
    outputs, exact_outputs = layer(inputs), exact(exact_inputs)
    assert_close(outputs, exact_outputs)
    (outputs * upstream).sum().backward()
    (exact_outputs * upstream.double()).sum().backward()
    for found, expected in [
        (inputs, exact_inputs),
        *zip(layer.parameters(), exact.parameters(), strict=True),
    ]:
        assert found.grad is not None and expected.grad is not None
        assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("trained", ["inputs", "weight"])
def test_a_gradient_that_nobody_needs_is_not_computed(onednn: None, trained: str) -> None:
    layer = nn.Linear(96, 128, bias=False).requires_grad_(trained == "weight")
    use_fast_products(layer)
    inputs = drawn(200, 96).requires_grad_(trained == "inputs")
    layer(inputs).sum().backward()  # upstream is one number, expanded
    assert (inputs.grad is None) == (trained == "weight")
    assert (layer.weight.grad is None) == (trained == "inputs")
    found = inputs.grad if trained == "inputs" else layer.weight.grad
    ones = torch.ones(200, 128, dtype=torch.float64)
    exact = ones @ layer.weight.double() if trained == "inputs" else ones.T @ inputs.double()
    assert found is not None
    assert_close(found, exact)


def test_the_same_product_has_the_same_bits(onednn: None) -> None:
    # From memory that begins elsewhere, too.
    left, right = drawn(300, 64), drawn(64, 130)
    moved = torch.cat([torch.zeros(7), left.flatten()])[7:].view(300, 64)
    assert torch.equal(product(left, right), product(moved, right))
    assert torch.equal(product(left.T, left), product(moved.T, moved))


@pytest.mark.parametrize(
    ("rows", "dtype"), [(8, torch.float32), (300, torch.float64), (300, torch.bfloat16)], ids=["small", "f64", "bf16"]
)
def test_small_products_and_other_dtypes_stay_with_torch(
    onednn: None, no_onednn: None, rows: int, dtype: torch.dtype
) -> None:
    layer = nn.Linear(64, 130).to(dtype)
    inputs = drawn(rows, 64, dtype=torch.float32).to(dtype)
    expected = layer(inputs)
    use_fast_products(layer)
    assert torch.equal(layer(inputs), expected)
    assert torch.equal(product(inputs, inputs.T), inputs @ inputs.T)


def test_on_a_processor_where_mkl_is_as_fast_nothing_changes(monkeypatch: pytest.MonkeyPatch, no_onednn: None) -> None:
    monkeypatch.setattr(cpu_products, "_onednn_is_faster", lambda: False)
    layer, inputs = nn.Linear(64, 130), drawn(300, 64)
    expected = layer(inputs)
    use_fast_products(layer)
    assert "forward" not in vars(layer)
    assert torch.equal(layer(inputs), expected)
    assert torch.equal(product(inputs, inputs.T), inputs @ inputs.T)


@pytest.mark.parametrize(
    ("vendor", "family", "is_zen_5"),
    [
        ("AuthenticAMD", "26", True),
        ("AuthenticAMD", "25", False),  # Zen 3 and 4
        ("GenuineIntel", "6", False),
        ("HygonGenuine", "26", False),
    ],
)
def test_processors_are_told_by_vendor_and_family(vendor: str, family: str, is_zen_5: bool) -> None:
    text = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 2\n"
    assert cpu_products._is_zen_5(text) == is_zen_5


def test_a_processor_without_a_family_is_not_one_of_them() -> None:
    assert not cpu_products._is_zen_5("processor\t: 0\nBogoMIPS\t: 50.00\n")  # as on ARM
