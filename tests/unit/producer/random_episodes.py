"""Play random episodes with a conversation tree, and check its trajectories against what the engine was asked and said.

The engine here samples anything: words, single bytes, tokens at random, special ones too, of changing policy versions.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coati_rl.types import Completion, Prompt, RolloutGroup, Score, Trajectory
from producer.environments.chat import ChatTemplate, TemplateError
from producer.environments.recorder import AnswerNode, Context, ConversationTree
from tests.unit.producer.chat_families import TOOL, family_tokenizer

TOOLS = {"qwen2_5", "qwen3", "qwen3_5_think", "glm4moe", "llama3_2", "gptoss", "lfm2_v2", "mistral_v3", "mistral_v7"}
ANSWERS = ("words", "bytes", "random", "spaces", "think", "call")
ENDS = ("stop", "length", "other")
MOVES = ("user", "tool", "text", "tokens", "nothing", "client", "changed", "again", "back")
WORDS = ("The sum of 17 and 25", " is 42.", "\n\nLet me think", " Übung 日本語 🙂", ' {"a": 17}')


@dataclass
class Answer:
    """What the engine was given, what it said, and how."""

    context: tuple[int, ...]
    completion: Completion
    temperature: float


@dataclass
class Play:
    """One random episode; `seed` decides on what is said."""

    family: str
    seed: int
    with_tools: bool = False
    tokenizer: Any = None  # in place of the family's own
    log: list[Answer] = field(default_factory=list)
    forks: int = 0
    is_chat: bool = True  # so far nothing but messages: each context is what the template writes

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.tokenizer = self.tokenizer or family_tokenizer(self.family)
        self.template = ChatTemplate(self.tokenizer, tools=[TOOL] if self.with_tools else [])
        self.tree = ConversationTree(self.template, episode=0)
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": self.words()}]
        self.prompt = self.template.prompt(self.messages)
        self.nodes: list[AnswerNode] = [self.tree.start(self.prompt, self.messages)]
        self.context = self.tree.extend(self.nodes[0])

    def words(self) -> str:
        return "".join(self.random.choices(WORDS, k=self.random.randint(1, 3)))

    def answer(self, kind: str, end: str) -> None:
        """Have the engine that is made up here answer."""
        message: dict[str, Any] = {"role": "assistant", "content": self.words()}
        if kind == "think":
            message["content"] = f"<think>\n{self.words()}\n</think>\n\n{message['content']}"
        elif kind == "spaces":
            message["content"] = f" {message['content']}\n"
        ids = list(self.template.encode(message["content"]))
        if kind == "bytes":
            ids = [each for byte in message["content"].split(" ") for each in self.template.encode(byte)]
        elif kind == "random":
            ids = [self.random.randrange(len(self.tokenizer)) for _ in range(self.random.randint(0, 8))]
        if kind == "call":
            call = {"name": "add", "arguments": '{"a":17, "b":  25}'}
            message = {"role": "assistant", "content": "", "tool_calls": [{"id": "call12345", "function": call}]}
        else:
            message["content"] = self.tokenizer.decode(ids, skip_special_tokens=True)
        if end == "stop":
            ids.append(self.tokenizer.eos_token_id)
        elif end == "other":
            ids.append(self.random.choice(list(self.tokenizer.added_tokens_decoder)))
        completion = Completion(
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=-np.array([self.random.random() for _ in ids], dtype=np.float32),
            policy_versions=np.array(sorted(self.random.choices((3, 4, 5), k=len(ids))), dtype=np.int32),
            finish_reason="length" if end == "length" else "stop",
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
        )
        self.record(completion, temperature=self.random.choice((0.0, 0.7, 1.0)), message=message)

    def record(self, completion: Completion, *, temperature: float, message: dict[str, Any]) -> None:
        """Add an answer of the engine in the context."""
        self.log.append(Answer(self.context.token_ids, completion, temperature))
        self.nodes.append(self.tree.add(self.context, completion, temperature=temperature, message=message))

    def move(self, kind: str) -> None:
        """The next context."""
        node = self.nodes[-1]
        calls = [call for message in node.messages[-1:] for call in message.get("tool_calls", ())]
        new = [{"role": "user", "content": self.words()}]
        if kind == "tool" and calls:
            new = [{"role": "tool", "name": "add", "tool_call_id": call["id"], "content": "42"} for call in calls]
        if kind in ("user", "tool"):
            self.context = self.tree.extend(node, new)
        elif kind == "text":
            self.context = self.tree.extend(node, self.words())
        elif kind == "tokens":
            self.context = self.tree.extend(
                node, [self.random.randrange(300) for _ in range(self.random.randint(0, 3))]
            )
        elif kind == "nothing":
            self.context = self.tree.extend(node, self.random.choice((None, "", [])))
        elif kind == "client":
            self.context = self.tree.find([*node.messages, *new])
        elif kind == "changed":
            place = self.random.randrange(len(node.messages))
            messages = [dict(message) for message in (*node.messages, *new)]
            messages[place]["content"] = messages[place]["content"].strip() + self.random.choice(("", " not"))
            self.context = self.tree.find(messages)
        elif kind == "back":
            self.context = self.tree.extend(self.random.choice(self.nodes[1:]), new)
        self.is_chat &= kind not in ("text", "tokens", "nothing") and self.context.answer_so_far is None
        self.forks += self.context.is_fork


def play(family: str, turns: Sequence[tuple[str, str, str]], *, with_tools: bool, seed: int) -> Play:
    """An episode of these turns, or of those before one that the template refuses."""
    played = Play(family, seed, with_tools=with_tools and family in TOOLS)
    for answer, end, move in turns:
        played.answer(answer, end)
        try:
            played.move(move)
        except TemplateError:
            break
        check_context(played, played.context)
    return played


def check_context(played: Play, context: Context) -> None:
    """What the engine is given begins with what is recorded, or is rendered anew; its text is the template's."""
    node = context.node
    if node is not None and not context.is_fork:
        assert context.token_ids[: len(node.token_ids)] == node.token_ids
    if played.is_chat:
        assert played.template.decode(context.token_ids) == played.template.render(context.messages)


def check_trajectories(log: Sequence[Answer], trajectories: Sequence[Trajectory], prompt: tuple[int, ...]) -> None:
    """Each sampled token is once in a loss, in the context that the engine was given, with the engine's own numbers."""
    seen: list[int] = []
    for trajectory in trajectories:
        own = [log[turn.index] for turn in trajectory.turns]
        expected = np.zeros(len(trajectory.token_ids), dtype=bool)
        for turn, said in zip(trajectory.turns, own, strict=True):
            assert tuple(trajectory.token_ids[: turn.start].tolist()) == said.context
            np.testing.assert_array_equal(trajectory.token_ids[turn.start : turn.end], said.completion.token_ids)
            assert turn.finish_reason == said.completion.finish_reason
            expected[turn.start : turn.end] = True
            seen.append(turn.index)
        np.testing.assert_array_equal(trajectory.loss_mask, expected)
        completions = [said.completion for said in own]
        np.testing.assert_array_equal(trajectory.logprobs, np.concatenate([each.logprobs for each in completions]))
        np.testing.assert_array_equal(
            trajectory.policy_versions, np.concatenate([each.policy_versions for each in completions])
        )
        np.testing.assert_array_equal(
            trajectory.temperature,
            np.concatenate([np.full(len(said.completion.token_ids), said.temperature, np.float32) for said in own]),
        )
        assert trajectory.text == completions[-1].text
    assert sorted(seen) == list(range(len(log)))
    assert seen[-1] == len(log) - 1, "the last answer is the one that is scored"
    check_group(trajectories, prompt)


def check_group(trajectories: Sequence[Trajectory], prompt: tuple[int, ...]) -> RolloutGroup:
    """A group of the episode; it refuses a shared prefix that is not its parent's."""
    score = Score(reward=1.0, answer_correct=True, format_valid=True, verdict="ok")
    return RolloutGroup(
        lease_id=0,
        producer_id=0,
        prompt=Prompt(uid="p0", token_ids=prompt, ground_truth=""),
        temperature=1.0,
        trajectories=trajectories,
        scores=(score,),
    )
