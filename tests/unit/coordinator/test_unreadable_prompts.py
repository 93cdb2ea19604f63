"""Test what a run does when a prompt cannot be read or made any more."""

import pytest

from coati_rl.coordinator.prompt_queue import PromptQueue
from coati_rl.errors import RunError


def test_a_prompt_that_cannot_be_drawn_ends_the_run_with_its_cause(make_coordinator, make_prompts):
    coordinator = make_coordinator(num_prompts=8)
    queue = coordinator._state.flow._queue

    class Broken:
        order, length = queue.order, 8

        def draw(self, number):
            raise RunError("--dataset a.jsonl, line 3: the file has changed")

    queue._source = Broken()
    coordinator.add_producer(0, version=0)
    reply = coordinator.lease(0, max_prompts=2, timeout_s=0)
    assert (reply.leases, queue.num_drawn) == ((), 0)
    with pytest.raises(RunError, match=r"a.jsonl, line 3: the file has changed"):
        coordinator.next_work(0, rank=0, timeout_s=1)


def test_what_waits_is_found_from_the_end_of_what_was_drawn(make_prompts):
    drawn = []

    class Source:
        order, length = None, None

        def draw(self, number):
            drawn.append(number)
            return make_prompts(number + 1)[number]

    queue = PromptQueue(Source())
    queue.resume(100, ["train-95", "train-97"])
    assert [prompt.uid for prompt in queue.waiting] == ["train-95", "train-97"]
    assert drawn == [99, 98, 97, 96, 95]
