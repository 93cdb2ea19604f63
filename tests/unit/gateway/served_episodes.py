"""Serve episodes over real HTTP with the real app, server, recorder and engine thread; the engine says given texts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

from coati_rl.types import SamplingParams, Trajectory
from producer.engines.engine_thread import ThreadedEngine
from producer.environments.chat import ChatTemplate
from producer.environments.recorder import ConversationTree
from producer.gateway.app import BodyLimits, make_app
from producer.gateway.conversations import Language, RecordedConversation
from producer.gateway.engine_sample import EngineSample
from producer.gateway.episode_table import PREFIX, EpisodeTable, Registered, reward_router
from producer.gateway.sampling_rules import SamplingRules
from producer.gateway.served_models import ServedModels
from producer.gateway.server import ServerThread
from producer.gateway.session import Session
from producer.tools.call_formats import tool_format_for
from tests.unit.gateway.speaking_engine import SpeakingCore, Speech, speaking_engine
from tests.unit.producer.chat_families import family_tokenizer

SAMPLING = SamplingParams(temperature=0.8, max_new_tokens=200)


@dataclass
class OpenEpisode:
    """An episode as its agent and as the trainer see it."""

    url: str
    registered: Registered
    conversation: RecordedConversation
    tree: ConversationTree
    client: httpx.Client

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def chat(self, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
        reply = self.post("chat/completions", {"model": "any", "messages": messages, **more})
        assert reply.status_code == 200, reply.text
        body: dict[str, Any] = reply.json()
        return body

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return self.tree.trajectories()


class Served:
    """The gateway of one engine; `open` makes episodes."""

    def __init__(
        self, engine: ThreadedEngine, core: SpeakingCore, *, limits: BodyLimits, in_flight: tuple[int, int]
    ) -> None:
        self.engine, self.core = engine, core
        self.tokenizer = core.tokenizer
        self.table = EpisodeTable()
        self._in_flight = in_flight  # calls at a time, and waiting
        self.language = Language(self.tokenizer, ChatTemplate(self.tokenizer), tool_format_for(self.tokenizer))
        app = make_app(
            lambda request: self.table.find(request).session,
            prefix=PREFIX,
            models=ServedModels.one("policy"),
            limits=limits,
        )
        app.include_router(reward_router(self.table, limits))
        self.server = ServerThread(app)
        self._clients: list[httpx.Client] = []

    def open(self, *, is_trained: bool = True, sampling: SamplingParams = SAMPLING) -> OpenEpisode:
        tree = ConversationTree(self.language.template, episode=0, prompt_ids=(1,))
        conversation = RecordedConversation(self.language, tree)
        rules = SamplingRules(sampling=sampling, is_trained=is_trained, may_renormalise=not is_trained)
        session = Session(
            conversation,
            EngineSample(self.engine, sampling),
            rules,
            decode=self.language.decode,
            max_in_flight=self._in_flight[0],
            max_waiting=self._in_flight[1],
        )

        async def register() -> Registered:
            return self.table.register(session, conversation)

        registered = self.server.submit(register()).result(60)
        url = self.server.url + PREFIX.format(episode=registered.episode_id)
        headers = {"Authorization": f"Bearer {registered.token}"}
        client = httpx.Client(base_url=url, headers=headers, timeout=20, trust_env=False, verify=False)
        self._clients.append(client)
        return OpenEpisode(url, registered, conversation, tree, client)

    def end(self, episode: OpenEpisode) -> None:
        async def end() -> None:
            self.table.end(episode.registered)

        self.server.submit(end()).result(60)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.close()
        self.engine.close()


@contextmanager
def served(
    speech: Speech,
    *,
    family: str = "qwen2_5",
    limits: BodyLimits | None = None,
    max_in_flight: int = 8,
    max_waiting: int = 0,
) -> Iterator[Served]:
    engine, core = speaking_engine(family_tokenizer(family), speech)
    gateway = Served(engine, core, limits=limits or BodyLimits(), in_flight=(max_in_flight, max_waiting))
    try:
        yield gateway
    finally:
        gateway.close()
