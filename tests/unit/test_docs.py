"""Test the statements of the documents that readers copy."""

import re
from pathlib import Path

import pytest

from coati_rl.algorithms.advantage import STD_EPS
from coati_rl.algorithms.aggregation import token_weight
from coati_rl.algorithms.over_length import over_length_penalty
from coati_rl.algorithms.token_advantages import VARIANCE_EPS
from coati_rl.build import build_loss
from coati_rl.config import Config
from coati_rl.config.presets import PRESETS
from coati_rl.estimator import load_estimator

ROOT = Path(__file__).parents[2]
ALGORITHMS = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The Python of docs/algorithms.md that is called mine.py, as a file."""
    (code,) = re.findall(r'```python title="mine\.py"\n(.*?)```', ALGORITHMS, flags=re.DOTALL)
    path = tmp_path / "mine.py"
    path.write_text(code, encoding="utf-8")
    return path


def test_the_example_of_a_loss_and_an_advantage_of_ones_own_is_accepted(example: Path) -> None:
    loss = build_loss(Config(policy_loss=f"{example}:my_terms").algorithm)
    assert loss.is_token_separable
    assert load_estimator(f"{example}:my_advantage") is not None


def test_the_table_of_presets_says_what_the_presets_say() -> None:
    rows = [line.split(" | ") for line in ALGORITHMS.splitlines() if line.startswith("| `")]
    table = {row[0].strip("| `"): row for row in rows if row[0].strip("| `") in PRESETS}
    assert table.keys() == PRESETS.keys()
    for name, (_, advantage, whitened, _, aggregation, kl, *_) in table.items():
        config = Config(algo=name)
        assert advantage == config.algorithm.advantage_estimator
        assert whitened == ("yes" if config.algorithm.whiten_advantages else "no")
        assert aggregation == config.algorithm.loss_variation
        has_kl = f"{config.algorithm.kl_coeff} in the {config.algorithm.kl_place}, {config.algorithm.kl_estimator}"
        assert kl == (has_kl if config.algorithm.kl_coeff else "none")


def test_the_departures_name_the_numbers_of_the_code() -> None:
    departures = ALGORITHMS.partition("## Departures from the papers")[2].partition("\n## ")[0]
    told = {
        f"adds eps = {STD_EPS:g} to the group's deviation": "`GRPO`",
        f"Whitening has {VARIANCE_EPS:g} under the root": "`GRPO`",
        "divides that sum by max_new_tokens": "`RLOO`",
        "is over the tokens of an optimizer step": "Whitening",
        "A right answer's reward is 1, the reference's is 10": "",
        "a response of L_max tokens or more loses the full amount": "Over-length",
    }
    for sentence, subject in told.items():
        (line,) = [entry for entry in departures.split("\n- ") if sentence.replace("e-0", "e-") in entry]
        assert line.lstrip("- \n").startswith(subject)
    assert token_weight(3, Config(algo="RLOO").algorithm.loss_variation, max_length=16) == 1 / 16
    assert over_length_penalty(16, max_length=16, cache_length=4, scale=Config().algorithm.reward_scale) == -1
