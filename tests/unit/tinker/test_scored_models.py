"""A model that only scores, as a reference does, keeps none of the data that it has scored."""

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
