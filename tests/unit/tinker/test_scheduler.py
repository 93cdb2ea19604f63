"""Owners share the training part: requests of models are computed together, and a huge one counts as what it is."""

import threading

import numpy as np

from coati_rl.tinker.core import Datum, LossRequest, LossResult, RequestError
from coati_rl.tinker.scheduler import Job, Scheduler


class Counting:
    """Record the calls of a training part; the first one waits until the others' jobs are there."""

    def __init__(self):
        self.calls, self.go, self.began = [], threading.Event(), threading.Event()

    def check(self, request):
        if request.loss == "unknown":
            raise RequestError("loss_fn: no such loss")

    def forward_backward(self, requests):
        self.calls.append([each.model for each in requests])
        return [LossResult(logprobs=[], metrics={"loss:sum": float(len(each.data))}) for each in requests]

    def close(self):
        self.calls.append("closed")


class Jobs:
    """Submit jobs, all of them before the first one is computed."""

    def __init__(self, batch_tokens):
        self.core, self.results = Counting(), []
        self.scheduler = Scheduler(self.core, batch_tokens=batch_tokens)
        self.left, self.done = 0, threading.Event()
        self.work("nobody", "first", lambda _: (self.core.began.set(), self.core.go.wait(60)))
        assert self.core.began.wait(60)

    def loss(self, owner, model, tokens, loss="cross_entropy"):
        datum = Datum(tokens=np.zeros(tokens, np.int64), inputs={})
        self.submit(owner, model, tokens, loss=LossRequest(model=model, data=[datum], loss=loss))

    def work(self, owner, model, work):
        self.submit(owner, model, 1, work=work)

    def submit(self, owner, model, cost, **others):
        self.left += 1

        def done(result):
            self.results.append((model, result))
            self.left -= 1
            if not self.left:
                self.done.set()

        self.scheduler.submit(Job(owner=owner, model=model, cost=cost, done=done, **others))

    def run(self):
        self.core.go.set()
        assert self.done.wait(60)
        self.scheduler.close()
        return self.core.calls[:-1]


def test_requests_of_several_models_are_one_call_and_a_model_s_own_are_calls_in_order():
    jobs = Jobs(batch_tokens=100)
    for model in ("a", "b", "c"):
        jobs.loss("anna", model, 10)
        jobs.loss("anna", model, 10)
    assert jobs.run() == [["a", "b", "c"], ["a", "b", "c"]]


def test_a_step_waits_for_its_model_s_loss_and_not_for_others():
    jobs, order = Jobs(batch_tokens=100), []
    jobs.loss("anna", "a", 10)
    jobs.work("anna", "a", lambda core: order.append(len(core.calls)))
    for _ in range(5):
        jobs.loss("bert", "b", 10)
    jobs.run()
    assert order == [1]


def test_a_huge_request_is_computed_alone_and_then_others_have_their_share():
    jobs = Jobs(batch_tokens=100)
    for _ in range(3):
        jobs.loss("anna", "huge", 1000)
    for _ in range(20):
        jobs.loss("bert", "small", 60)
    calls = jobs.run()
    assert calls[0] == ["huge"] or calls[1] == ["huge"]
    places = [number for number, call in enumerate(calls) if call == ["huge"]]
    assert len(places) == 3
    between = calls[places[0] + 1 : places[1]]
    assert len(between) >= 16  # 16 * 60 tokens are nearly what the huge one took


def test_many_models_of_one_owner_leave_another_its_half():
    jobs = Jobs(batch_tokens=40)
    for number in range(8):
        for _ in range(4):
            jobs.loss("anna", f"a{number}", 20)
    for _ in range(8):
        jobs.loss("bert", "b", 20)
    calls = jobs.run()
    last = max(number for number, call in enumerate(calls) if "b" in call)
    assert last < 9  # not after the 32 of the other


def test_a_refused_request_is_answered_and_the_others_are_computed():
    jobs = Jobs(batch_tokens=100)
    jobs.loss("anna", "a", 10)
    jobs.loss("bert", "b", 10, loss="unknown")
    assert jobs.run() == [["a"]]
    assert isinstance(dict(jobs.results)["b"], RequestError)
    assert isinstance(dict(jobs.results)["a"], LossResult)


def test_an_error_of_the_training_part_is_the_answer_and_the_next_job_runs():
    jobs, failure = Jobs(batch_tokens=100), ZeroDivisionError("no")

    def fail(_):
        raise failure

    jobs.work("anna", "a", fail)
    jobs.loss("anna", "a", 10)
    assert jobs.run() == [["a"]]
    assert ("a", failure) in jobs.results


def test_jobs_of_a_model_that_ended_are_taken_back():
    jobs = Jobs(batch_tokens=100)
    jobs.loss("anna", "a", 10)
    jobs.loss("anna", "b", 10)
    assert [job.model for job in jobs.scheduler.drop("a")] == ["a"]
    jobs.left -= 1
    assert jobs.run() == [["b"]]
