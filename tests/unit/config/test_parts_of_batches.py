"""Test that the parts of a batch divide it where only the batch is given."""

import pytest

from coati_rl.config.cli import parse
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError


@pytest.mark.parametrize(("whole", "part"), [(4, 4), (6, 6), (12, 6), (20, 5), (64, 8), (7, 7), (11, 1), (1, 1)])
def test_a_part_is_the_largest_divisor_up_to_the_default(whole: int, part: int) -> None:
    parallel = parse(["-ibs", str(whole), "-tbs", str(whole)])[0].parallel
    assert (parallel.inference_microbatch_size, parallel.train_minibatch_size) == (part, part)


def test_a_part_that_is_given_stays() -> None:
    with pytest.raises(ConfigError, match=r"-imbs 8 exceeds -ibs 4"):
        check(parse(["-ibs", "4", "-imbs", "8", "-tbs", "4"])[0])


def test_a_batch_that_is_no_number_is_explained_by_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"^-?-inference-batch-size 'four'"):
        parse(["-ibs", "four"])
