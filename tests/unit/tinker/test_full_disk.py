"""On a full disk a step that was taken counts, and what could not be saved leaves nothing on the disk."""

import pytest

from tests.tinker_service import run


def files(root):
    """Files and directories below a server's, without those that each server has."""
    return sorted(
        str(path.relative_to(root))
        for name in ("models", "samplers", "checkpoints")
        for path in (root / name).rglob("*")
    )


def test_a_step_whose_automatic_checkpoint_cannot_be_written_is_answered_as_taken_and_a_later_one_is_saved(
    tmp_path, caplog
):
    async def work(running):
        answers = []
        for number in range(4):
            running.core.is_disk_full = number < 2
            answers.append(await running.answer(await running.step()))
            assert bool(files(tmp_path)) == (number == 3)
        assert all("metrics" in each for each in answers)
        return running.model.saved_seq

    assert run(work, tmp_path, save_steps=2) == 4
    assert "no automatic checkpoint of session-" in caplog.text and "after request 2" in caplog.text


def test_steps_since_the_last_checkpoint_that_was_written_are_taken_again_after_a_restart(tmp_path):
    async def train(running):
        running.core.is_disk_full = True
        for _ in range(3):
            await running.answer(await running.step())

    async def go_on(running):
        running.resume()
        assert "metrics" in await running.answer(await running.step())
        return running.core.steps[running.model.id]

    run(train, tmp_path, save_steps=1)
    assert run(go_on, tmp_path, save_steps=1) == 4


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "sampler of no name"])
def test_a_failed_save_leaves_nothing_and_the_checkpoint_before_is_there(tmp_path, kind):
    async def work(running):
        save = running.publish if kind == "sampler of no name" else lambda: running.save("a", overwrite=True, kind=kind)
        assert "error" not in await running.answer(await save())
        before = files(tmp_path)
        running.core.is_disk_full = True
        answer = await running.answer(await save())
        assert "No space left" in answer["error"]
        return before, files(tmp_path)

    before, after = run(work, tmp_path)
    assert before == after and before


def test_what_a_killed_server_left_half_written_is_removed_at_the_next_start(tmp_path):
    for name in (
        "models/.a.partial",
        "samplers/.b.partial",
        "checkpoints/..part-c.partial",
        "checkpoints/.part-d/whole",
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "weights").write_text("half")

    async def work(running):
        return files(tmp_path)

    assert run(work, tmp_path) == []
