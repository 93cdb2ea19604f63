"""Test runs whose reference and weights of KL and entropy follow the policy: killed, and the same bits after."""

import pytest

from tests.integration.runs.records import lines
from tests.integration.runs.resuming import assert_goes_on_bit_for_bit

pytestmark = pytest.mark.timeout(900)
LAYOUTS = {
    "dp1": ("-t", 1, "-tbs", 4, "-tMbs", 4),
    "dp2": ("-t", 2, "-tbs", 2, "-tMbs", 2),
    "tp2": ("-t", 2, "-tp", 2, "-tbs", 4, "-tMbs", 4),
    "pp2": ("-t", 2, "-pp", 2, "-tbs", 4, "-tMbs", 4, "-tmbs", 4),
    "fsdp2": ("-t", 2, "--plugin", "fsdp2", "-tbs", 2, "-tMbs", 2),
}
FOLLOWING = ("--kl-controller", "adaptive", "--kl-target", 0.001, "--kl-horizon", 200, "-kl", 0.05)
FOLLOWING += ("--entropy-target", 20, "--entropy-coeff-delta", 0.002, "--reference-update", "every=1,mix=0.5")
FOLLOWING += ("--token-selection", "top_entropy", "--token-fraction", 0.5)


@pytest.mark.parametrize("layout", [pytest.param(each, marks=pytest.mark.full) for each in LAYOUTS])
def test_a_killed_run_goes_on_with_what_it_has_adapted(make_tiny, start_run, flags, layout):
    job = (*flags(make_tiny(tied=True)), *FOLLOWING, *LAYOUTS[layout], "-si", 1, "--max-steps", 4)
    keys = ("loss", "kl_mean", "kl_coeff", "entropy_coeff", "entropy_mean", "grad_norm")
    whole = assert_goes_on_bit_for_bit(start_run, job, places=(4, "4/reference"), keys=keys)
    records = lines(whole.run_dir / "metrics.jsonl")
    assert records[0]["kl_coeff"] == 0.05 and len({record["kl_coeff"] for record in records}) == 4
    assert records[0]["entropy_coeff"] == 0 and records[1]["entropy_coeff"] == pytest.approx(0.002)
