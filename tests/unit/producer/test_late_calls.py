"""Test calls that arrive as their episode, or their lease, ends: they do not open an episode that nobody would end."""

import asyncio
import threading

import pytest

from coati_rl.errors import RolloutError
from coati_rl.observability.timeline import NO_TIMELINE
from producer.engines.admission import AdmissionQueue, Submission
from producer.generation import LeaseGenerate
from tests.unit.producer.test_rollout_loop import Engine, lease


class Admitting(Engine):
    """Lets requests in as an engine does; `meanwhile` is called as an episode opens."""

    def __init__(self, meanwhile=lambda: None):
        super().__init__()
        self.admission, self.named, self.meanwhile = AdmissionQueue(), set(), meanwhile

    def open_episode(self, episode_id):
        self.named.add(episode_id)
        self.meanwhile()

    def close_episode(self, episode_id):
        self.named.discard(episode_id)
        self.admission.close_episode(episode_id)

    def submit(self, request, on_tokens=None):
        assert request.episode_id in self.named
        assert self.admission.admits(Submission(request=request, stream=None), policy_version=4, is_committing=False)
        return super().submit(request, on_tokens)


def generate_with(engine):
    call_soon = asyncio.get_running_loop().call_soon_threadsafe
    return LeaseGenerate(lease(0), engine, call_soon=call_soon, min_policy_version=4, timeline=NO_TIMELINE)


async def turns(number=10):
    for _ in range(number):
        await asyncio.sleep(0)


def test_a_first_call_that_is_under_way_when_its_agent_ends_does_not_open_the_episode_again():
    async def check():
        engine, loop = Admitting(), asyncio.get_running_loop()
        generate = generate_with(engine)

        def of_gateway():  # while the loop is busy
            asyncio.run_coroutine_threadsafe(generate((1, 2), episode=0), loop).cancel()
            generate.end_episode(0)

        thread = threading.Thread(target=of_gateway)
        thread.start()
        thread.join()
        await turns()
        assert (engine.requests, engine.admission.open_episodes()) == ([], ())
        task = asyncio.ensure_future(generate((1, 2), episode=1))
        await turns()
        assert engine.admission.open_episodes() == ("lease-0-1",), "the others go on"
        task.cancel()
        generate.close()
        assert engine.admission.open_episodes() == ()

    asyncio.run(check())


def test_an_episode_that_ends_while_its_first_call_is_submitted_is_closed_after_it():
    async def check():
        ending = threading.Thread(target=lambda: generate.end_episode(0))

        def end():
            ending.start()
            ending.join(0.2)  # it waits for the call to be submitted

        engine = Admitting(meanwhile=end)
        generate = generate_with(engine)
        task = asyncio.ensure_future(generate((1, 2), episode=0))
        await turns()
        await asyncio.to_thread(ending.join)
        assert [request.episode_id for request in engine.requests] == ["lease-0-0"]
        assert engine.admission.open_episodes() == ()
        task.cancel()

    asyncio.run(check())


@pytest.mark.parametrize("episode", [0, None])
def test_calls_for_a_lease_that_is_closed_are_refused(episode):
    async def check():
        engine = Admitting()
        generate = generate_with(engine)
        generate.close()
        with pytest.raises(RolloutError, match="the episode has ended"):
            await asyncio.wait_for(generate((1, 2), episode=episode), 2.0)
        assert (engine.requests, engine.admission.open_episodes()) == ([], ())

    asyncio.run(check())
