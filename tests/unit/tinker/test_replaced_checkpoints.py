"""A sampler has the weights of the checkpoint that it was made of, or none: a path may get others."""

import shutil

import pytest

from tests.tinker_service import run

GONE = "the checkpoint of this sampler was overwritten or deleted; make a new sampling client"


async def save(running, name="latest", **others):
    return (await running.answer(await running.save(name, **others)))["path"]


def test_a_new_sampler_of_an_overwritten_checkpoint_has_the_new_weights_and_an_old_one_its_own(tmp_path):
    async def work(running):
        path = await save(running)
        old = await running.sampler(path)
        found = [await running.sample(old)]
        await running.answer(await running.step())
        assert path == await save(running, overwrite=True)
        new = await running.sampler(path)
        found += [await running.sample(new), await running.sample(old), await running.sample(new)]
        running.service.checkpoints.delete(running.service.checkpoints.find(path, "anyone"))
        await running.answer(await running.step())
        assert path == await save(running)
        return [*found, await running.sample(await running.sampler(path))]

    assert run(work, tmp_path) == [0, 1, 0, 1, 2]


def test_a_sampler_whose_weights_are_not_loaded_any_more_fails_by_name_when_others_have_their_place(tmp_path):
    async def work(running):
        path, other = await save(running), await save(running, "other")
        old = await running.sampler(path)
        found = [await running.sample(old)]
        await running.answer(await running.step())
        await save(running, overwrite=True)
        found += [await running.sample(await running.sampler(other)), await running.sample(old)]
        return [*found, await running.sample(await running.sampler(path))]

    assert run(work, tmp_path, max_published=1) == [0, 0, GONE, 1]


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_not_sampled_from(tmp_path):
    async def work(running):
        path = await save(running)
        await running.answer(await running.step())
        telling = running.service.bases.find("tiny").sampling
        publish = telling.publish

        def replaced_meanwhile(name, directory):
            file = directory / "tinker.json"
            file.write_text(file.read_text().replace('"made_by": "', '"made_by": "another'))
            publish(name, directory)

        telling.publish = replaced_meanwhile
        return await running.sample(await running.sampler(path)), telling.published

    assert run(work, tmp_path) == (GONE, {})


@pytest.mark.parametrize("is_new_there", [False, True])
def test_a_kill_while_a_checkpoint_is_overwritten_leaves_the_former_one_or_the_new_one(tmp_path, is_new_there):
    async def begin(running):
        path = await save(running)
        await running.answer(await running.step())
        directory = running.service.checkpoints.directory(path)
        shutil.copytree(directory, tmp_path / "checkpoints" / ".former-1")
        await save(running, overwrite=True)
        if not is_new_there:
            shutil.rmtree(directory)
        return path

    async def go_on(running):
        return await running.sample(await running.sampler(path)), list((tmp_path / "checkpoints").glob(".*"))

    path = run(begin, tmp_path)
    assert run(go_on, tmp_path) == (int(is_new_there), [])


def test_the_checkpoints_of_a_run_are_read_from_its_directory_alone(tmp_path):
    async def work(running):
        path = await save(running)
        checkpoints, run_id = running.service.checkpoints, path.split("/")[2]
        other = checkpoints.directory(path.replace(run_id, "other:train:0"))
        shutil.copytree(checkpoints.directory(path), other)  # of another run by its place alone
        found = [checkpoints.of("anyone", each) for each in (run_id, None, "../..", "x")]
        return [len(each) for each in found]

    assert run(work, tmp_path) == [1, 2, 0, 0]
