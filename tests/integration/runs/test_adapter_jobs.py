"""Test jobs on a dataset that train adapters: killed, they go on to the same bits, and PEFT reads what they save."""

import re
import shlex

import peft
import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.integration.runs.test_adapters import FILES, LORA
from tests.integration.runs.test_offline import (  # noqa: F401, fixtures
    evaluations,
    job_flags,
    rows,
    run_class,
    tensors,
)

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]
CLASSIFIERS = ("rm",)
LAYOUTS = {
    "dp1": ({}, ()),
    "dp2": ({"trainers": 2, "dp": 2}, ()),
    "tp2": ({"trainers": 2}, ("-tp", 2)),
    "fsdp2": ({"trainers": 2, "dp": 2}, ("--plugin", "fsdp2")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("job", ["sft", "rm", "dpo", "kto"])
def test_a_job_that_is_killed_goes_on_with_its_adapters(make_tiny, start_run, job_flags, job, layout):  # noqa: F811
    trainers, layout = LAYOUTS[layout]
    flags = [*job_flags(job, **trainers, epochs=10), *layout, *LORA]
    whole = start_run(*flags, name="whole")
    killed = start_run(*flags, name="killed")
    killed.wait_for_step(5)
    for process in killed.processes("local_trainer"):
        process.kill()
    assert killed.wait() == 1, killed.text()
    resume = re.search(rf"; resume from step \d+ with: coati-rl ({job} .*)$", killed.text().splitlines()[-1])
    assert resume, killed.text()
    assert whole.wait() == 0, whole.text()
    resumed = start_run(*shlex.split(resume[1]), name="killed")
    assert resumed.wait() == 0, resumed.text()
    last = whole.records()[-1]["step"]
    assert tensors(resumed, last) == tensors(whole, last) and tensors(whole, last).keys() == FILES
    assert evaluations(resumed) == evaluations(whole)
    losses = [each["loss"] for each in evaluations(whole)]
    assert losses[-1] < losses[0]
    auto = AutoModelForSequenceClassification if job in CLASSIFIERS else AutoModelForCausalLM
    settings = {"num_labels": 1} if job in CLASSIFIERS else {}
    base = auto.from_pretrained(make_tiny(tied=True), **settings)
    peft.PeftModel.from_pretrained(base, whole.run_dir / "checkpoints" / f"step-{last}")
