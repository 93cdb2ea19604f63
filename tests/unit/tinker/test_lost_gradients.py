"""No step is taken on a gradient that is not known: a call that failed may have added a part of it."""

from tests.tinker_service import Running, run

REMEDY = "go on from your last saved checkpoint"


def is_lost(answer):
    return answer != "ok" and REMEDY in answer.get("error", "") and answer["category"] == "user"


def test_no_step_follows_a_failed_loss_though_it_waited_behind_it_and_what_was_done_before_is_answered(tmp_path):
    async def work(running):
        compute = running.hold()
        asked = [await running.loss(), await running.step(), await running.loss(), await running.step()]
        running.core.failures = [None, RuntimeError("CUDA out of memory" + " and a trace" * 1000)]
        compute()  # no answer is recorded meanwhile
        answers = [await running.answer(each) for each in asked]
        assert answers[0] == "ok" and answers[1]["metrics"]
        assert is_lost(answers[2]) and "request 3 failed in the server (RuntimeError: CUDA out" in answers[2]["error"]
        assert is_lost(answers[3])
        again = [await running.loss(), await running.step(), await running.save("after")]
        assert all([is_lost(await running.answer(each)) for each in again])
        return running.core.steps[running.model.id]

    assert run(work, tmp_path) == 1


def test_each_model_of_a_failed_call_is_lost_and_others_are_not(tmp_path):
    async def work(running):
        pair = [running, Running(running.service, running.core), Running(running.service, running.core)]
        for each in pair[1:]:
            await each.begin()
        compute = running.hold()
        asked = [await each.loss() for each in pair[1:]]
        running.core.failures = [RuntimeError("no")]
        compute()
        assert all([is_lost(await each.answer(one)) for each, one in zip(pair[1:], asked, strict=True)])
        assert running.core.passes[pair[1].model.id] == running.core.passes[pair[2].model.id] == 1  # one call
        return [is_lost(await each.answer(await each.step())) for each in pair]

    assert run(work, tmp_path) == [False, True, True]


def test_a_failed_step_loses_the_model_and_a_failed_forward_pass_does_not(tmp_path):
    async def work(running):
        running.core.failures = [RuntimeError("no")]
        forward = await running.answer(await running.loss(is_forward_only=True))
        assert forward["category"] == "server"
        assert (await running.answer(await running.step()))["metrics"]
        running.core.optim_step = lambda model, step: 1 / 0
        return is_lost(await running.answer(await running.step())), is_lost(await running.answer(await running.loss()))

    assert run(work, tmp_path) == (True, True)


def test_a_model_stays_lost_after_a_restart_at_which_the_request_succeeds(tmp_path):
    async def fail(running):
        running.core.failures = [RuntimeError("no")]
        assert is_lost(await running.answer(await running.loss()))

    async def go_on(running):
        running.resume()
        answers = [await running.answer(await running.step()), await running.answer(await running.loss())]
        return [is_lost(each) for each in answers], running.core.steps[running.model.id]

    run(fail, tmp_path)
    assert run(go_on, tmp_path) == ([True, True], 0)


def test_a_model_stays_lost_after_a_restart_by_a_step_that_failed(tmp_path):
    async def fail(running):
        running.core.optim_step = lambda model, step: 1 / 0
        assert is_lost(await running.answer(await running.step()))

    async def go_on(running):
        running.resume()
        return is_lost(await running.answer(await running.save("after")))

    run(fail, tmp_path)
    assert run(go_on, tmp_path)
