"""A model that only scores, as a reference does, keeps none of the data that it has scored, and no answer for long."""

import pytest

from coati_rl.tinker.api_error import ApiError
from coati_rl.tinker.state import LOSS
from tests.tinker_service import run


def test_what_was_scored_is_not_kept_and_a_restarted_server_does_not_score_it_again(tmp_path):
    async def score(running):
        asked = [await running.loss(is_forward_only=True), await running.loss(is_forward_only=True)]
        asked.append(await running.loss())
        assert [await running.answer(each) for each in asked] == ["ok"] * 3
        return [bool(each.body) for each in running.model.requests.values() if each.op == LOSS]

    async def go_on(running):
        running.resume()
        assert await running.answer(await running.loss(is_forward_only=True)) == "ok"
        assert (await running.answer(await running.save("after"))).get("category") is None
        return running.core.passes[running.model.id]

    assert run(score, tmp_path) == [False, False, True]
    assert run(go_on, tmp_path) == 2, "the pass that left a gradient, computed again, and the new one"


def test_an_answer_that_was_retrieved_some_time_ago_is_forgotten_and_the_next_requests_keep_their_numbers(tmp_path):
    async def score(running):
        asked = [await running.loss(is_forward_only=True) for _ in range(3)]
        assert [await running.answer(each) for each in asked[:2]] == ["ok"] * 2
        running.service.sweep()
        held = [len(each.reply.body) for each in running.model.requests.values() if each.reply and each.op == LOSS]
        assert held[:2] == [0, 0] and [each in running.service.state.futures for each in asked] == [False, False, True]
        with pytest.raises(ApiError, match="no request"):
            await running.answer(asked[0])
        running._seq -= 2  # its client asks for the second one again
        with pytest.raises(ApiError, match="was answered, and its answer retrieved, some time ago"):
            await running.loss(is_forward_only=True)
        running._seq += 1
        assert await running.answer(asked[2]) == "ok"
        return running.service.state

    async def go_on(running):
        running.resume()
        assert await running.answer(await running.loss(is_forward_only=True)) == "ok"
        assert await running.answer(await running.loss()) == "ok"
        return running.core.passes[running.model.id]

    async def save(running):
        running.resume()
        assert "error" not in await running.answer(await running.step())
        return sorted(running.model.requests)

    run(score, tmp_path, keep_answers_s=0.0)
    assert run(go_on, tmp_path, keep_answers_s=0.0) == 2, "none of the three is computed again"
    assert 1 not in run(save, tmp_path, keep_answers_s=0.0, save_steps=1)
