"""What the documents promise a reader who copies from them."""

import re
from pathlib import Path

import pytest

from coati_rl.algorithms.registry import build_loss, load_estimator
from coati_rl.config import Config
from coati_rl.config.presets import PRESETS

ROOT = Path(__file__).parents[2]
ALGORITHMS = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The Python of docs/algorithms.md as a file."""
    (code,) = re.findall(r"```python\n(.*?)```", ALGORITHMS, flags=re.DOTALL)
    path = tmp_path / "mine.py"
    path.write_text(code, encoding="utf-8")
    return path


def test_the_example_of_a_loss_and_an_advantage_of_ones_own_is_accepted(example: Path) -> None:
    loss = build_loss(Config(policy_loss=f"{example}:my_terms"))
    assert loss.is_token_separable
    assert load_estimator(f"{example}:my_advantage") is not None


def test_the_table_of_presets_says_what_the_presets_say() -> None:
    rows = [line.split(" | ") for line in ALGORITHMS.splitlines() if line.startswith("| `")]
    table = {row[0].strip("| `"): row for row in rows if row[0].strip("| `") in PRESETS}
    assert table.keys() == PRESETS.keys()
    for name, (_, advantage, whitened, _, aggregation, kl, *_) in table.items():
        config = Config(algo=name)
        assert advantage == config.advantage_estimator
        assert whitened == ("yes" if config.whiten_advantages else "no")
        assert aggregation == config.loss_variation
        has_kl = f"{config.kl_coeff} in the {config.kl_place}, {config.kl_estimator}"
        assert kl == (has_kl if config.kl_coeff else "none")
