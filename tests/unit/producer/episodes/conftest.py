"""Run episodes between a real fake engine and the runner, as a producer does."""

import time

import pytest

from coati_rl.data.chat_template import set_chat_template
from coati_rl.observability.timeline import NO_TIMELINE
from coati_rl.types import DEFAULT_TASK, Lease, Prompt, SamplingParams
from producer.engines.fake_engine import FakeEngine
from producer.environments.chat import ChatTemplate
from producer.environments.episode import EpisodeLimits
from producer.environments.episode_environment import EpisodeEnvironment
from producer.group_runner import GroupRunner

TIMEOUT_S = 30.0
QUESTION = ({"role": "user", "content": "q"},)


class RequestsSeen:
    """An engine, and the requests that it was given, by id."""

    def __init__(self, engine):
        self._engine = engine
        self.requests = []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def submit(self, request, on_tokens=None):
        self.requests.append(request)
        return self._engine.submit(request)


@pytest.fixture(scope="session")
def template(tokenizer):
    """The one of chatml: a turn ends with the end-of-sequence token."""
    import copy

    own = copy.deepcopy(tokenizer)
    set_chat_template(own, "chatml")
    return ChatTemplate(own)


@pytest.fixture
def engine(tokenizer):
    engine = FakeEngine(
        vocab_size=257,
        eos_token_id=tokenizer.eos_token_id,
        max_model_len=600,
        decode=lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True),
    )
    engine.wait_ready(30.0)
    yield RequestsSeen(engine)
    engine.close()


@pytest.fixture
def lease_of(template):
    """(number, size of the group, purpose, of the sampling) -> a lease of a prompt."""

    def make(number=0, group_size=2, purpose="train", columns=None, **sampling):
        prompt = Prompt(
            uid=f"p{number}",
            token_ids=template.prompt(QUESTION),
            ground_truth="4",
            purpose=purpose,
            messages=QUESTION,
            rendered=template.render(QUESTION),
            columns=columns or {},
        )
        params = SamplingParams(**{"temperature": 0.7, "max_new_tokens": 12, "seed": 11, **sampling})
        return Lease(lease_id=number, prompt=prompt, group_size=group_size, sampling=params)

    return make


@pytest.fixture
def play(template, engine, lease_of):
    """Play the episodes of leases, one unless given, to their end; returns what comes out, by lease."""
    opened = []

    def run(
        make_episode,
        *,
        leases=None,
        max_turns=3,
        max_tokens=600,
        timeout_s=TIMEOUT_S,
        at_once=True,
        host=None,
        chat=None,
        **lease,
    ):
        environment = EpisodeEnvironment(
            make_episode,
            chat or template,
            EpisodeLimits(max_turns=max_turns, max_tokens=max_tokens, timeout_s=timeout_s),
            correct_from={DEFAULT_TASK: 1.0},
            seed=5,
            host=host,
        )
        opened.append(environment)
        runner = GroupRunner(engine, environment, max_sequences=1000, group_size=2, timeline=NO_TIMELINE)
        leases = leases or [lease_of(**lease)]
        finished = {}
        try:
            for together in [leases] if at_once else [[lease] for lease in leases]:
                runner.submit(together, min_policy_version=0)
                deadline = time.monotonic() + TIMEOUT_S
                while not runner.is_drained:
                    assert time.monotonic() < deadline
                    finished |= {done.lease.lease_id: done for done in runner.take_finished(0.5)}
        finally:
            runner.close()
        return [finished[lease.lease_id] for lease in leases]

    yield run
    for environment in opened:
        environment.close()
