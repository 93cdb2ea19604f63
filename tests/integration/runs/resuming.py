"""Kill a run, go on with the command that it printed, and compare with the run that was not killed."""

import re
import shlex

from tests.integration.runs.records import (
    assert_complete,
    assert_engine_and_trainer_agree,
    assert_weights_moved,
    lines,
    read_rollouts,
)
from tests.integration.runs.test_offline import tensors


def assert_goes_on_bit_for_bit(start_run, job, *, places, keys):
    """Four steps, with SIGKILL of a trainer after two. `places`: of step-4 with models; `keys`: of metrics.jsonl."""
    whole = start_run(*job)
    assert whole.wait() == 0, whole.text()
    records = assert_complete(whole, steps=4)
    assert_weights_moved(records)
    assert_engine_and_trainer_agree(records)
    killed = start_run(*job, name="killed")
    killed.wait_for_step(2)
    killed.processes("ray::TrainerActor")[0].kill()
    assert killed.wait() == 1, killed.text()
    resume = re.search(r"resume from step \d+ with: \S+ \S*rl_example\.py (.*)$", killed.text().splitlines()[-1])
    assert resume, killed.text()
    resumed = start_run(*shlex.split(resume[1]), name="killed")
    assert resumed.wait() == 0, resumed.text()
    for place in places:
        assert tensors(resumed, place) == tensors(whole, place) and tensors(whole, place)
    assert read_rollouts(resumed) == read_rollouts(whole)
    found, right = (
        [[record[key] for key in keys] for record in lines(run.run_dir / "metrics.jsonl")] for run in (resumed, whole)
    )
    assert found == right
    return whole
