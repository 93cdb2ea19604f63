"""Test jobs on a dataset that train adapters: killed, they go on to the same bits, and PEFT reads what they save."""

import peft
import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.integration.runs.test_adapters import FILES, LORA
from tests.integration.runs.test_offline import (  # noqa: F401, fixtures
    evaluations,
    job_flags,
    killed_and_resumed,
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
    whole, resumed = killed_and_resumed(start_run, job, flags)
    last = whole.records()[-1]["step"]
    assert tensors(resumed, last) == tensors(whole, last) and tensors(whole, last).keys() == FILES
    assert evaluations(resumed) == evaluations(whole)
    losses = [each["loss"] for each in evaluations(whole)]
    assert losses[-1] < losses[0]
    auto = AutoModelForSequenceClassification if job in CLASSIFIERS else AutoModelForCausalLM
    settings = {"num_labels": 1} if job in CLASSIFIERS else {}
    base = auto.from_pretrained(make_tiny(tied=True), **settings)
    peft.PeftModel.from_pretrained(base, whole.run_dir / "checkpoints" / f"step-{last}")
