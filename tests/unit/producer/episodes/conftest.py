"""Run episodes between a real fake engine and the runner, as a producer does."""

import time

import numpy as np
import pytest

from coati_rl.config.cli import parse
from coati_rl.config.rules import check
from coati_rl.observability.timeline import NO_TIMELINE
from coati_rl.reading.chat_template import set_chat_template
from coati_rl.types import DEFAULT_TASK, Completion, Lease, Prompt, SamplingParams
from producer.engines.engine_thread import ThreadedEngine
from producer.engines.fake_engine import FakeEngine, _FakeCore
from producer.environments.chat import ChatTemplate
from producer.environments.episode import EpisodeLimits
from producer.environments.episode_environment import EpisodeEnvironment
from producer.group_runner import GroupRunner
from producer.made_environment import check_environment, make_environment

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
    """(number, size of the group, purpose, text of --input-template, of the sampling) -> a lease of a prompt."""

    def make(number=0, group_size=2, purpose="train", columns=None, text=None, **sampling):
        prompt = Prompt(
            uid=f"p{number}",
            token_ids=template.prompt(QUESTION) if text is None else template.encode(text),
            ground_truth="4",
            purpose=purpose,
            messages=QUESTION,
            rendered=template.render(QUESTION) if text is None else text,
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


@pytest.fixture(scope="session")
def model(template, tmp_path_factory):
    """A directory with the tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    template._tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def play_file(model, template, lease_of):
    """(file or FILE.py:NAME, what the policy says to a context, flags) -> the finished group, from --env on."""
    opened = []

    def run(name, answer, *flags, group_size=2, **lease):
        def complete(request, index):
            said = answer(template.decode(request.token_ids))
            token_ids = [*template.encode(said), template._tokenizer.eos_token_id][: request.sampling.max_new_tokens]
            return Completion(
                token_ids=np.array(token_ids, dtype=np.int32),
                logprobs=-np.arange(1, len(token_ids) + 1, dtype=np.float32),
                policy_versions=np.zeros(len(token_ids), dtype=np.int32),
                finish_reason="stop",
                text=said,
            )

        core = _FakeCore(vocab_size=257, eos_token_id=256, max_model_len=4000, decode=template.decode, expected=None)
        core._complete = complete
        engine = ThreadedEngine(core, policy_version=0)
        opened.append(engine)
        engine.wait_ready(30.0)
        arguments = ["-m", str(model), "-mpt", "100", "-mnt", "64", "--max-episode-tokens", "4000", *flags]
        config, _ = parse(["--env", str(name), *arguments])
        check(config)
        check_environment(config)
        environment = make_environment(config)
        opened.insert(0, environment)
        runner = GroupRunner(engine, environment, max_sequences=1000, group_size=2, timeline=NO_TIMELINE)
        opened.insert(0, runner)
        runner.submit([lease_of(group_size=group_size, **{"max_new_tokens": 64, **lease})], min_policy_version=0)
        finished, deadline = [], time.monotonic() + 60
        while not runner.is_drained:
            assert time.monotonic() < deadline
            finished += runner.take_finished(0.5)
        return finished[0]

    yield run
    for each in opened:
        each.close()
