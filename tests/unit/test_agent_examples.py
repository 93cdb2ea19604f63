"""Test the agents' examples without training: their commands, what each stage reads, the data.

The scripts run with programs in place of Python and coati-rl that only write down how they were called.
"""

import json
import random
import re
from pathlib import Path

import guessing_task
import make_agent_model
import multiplication_task
import pytest

from coati_rl.config.generate import GenerateConfig
from producer.environments.chat import ChatTemplate, check_template
from producer.made_environment import check_environment
from producer.tools.call_formats import tool_format_for
from tests.unit.recorded_script import check_job, inputs, make_repository, recorded_calls, run_script

GAME = {"min_number": 3, "max_number": 8, "max_turns": 3}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder with the scripts and the recording programs."""
    return make_repository(tmp_path, "agent_quickstart.sh", "textarena_example.sh")


@pytest.mark.parametrize(
    ("script", "jobs"), [("agent_quickstart", ["sft", "rl", "generate"]), ("textarena_example", ["sft", "rl"])]
)
def test_every_command_is_understood_and_reads_what_an_earlier_one_writes(
    repository: Path, monkeypatch: pytest.MonkeyPatch, script: str, jobs: list[str]
) -> None:
    done = run_script(repository, f"{script}.sh")
    assert done.returncode == 0, done.stderr
    made, *stages, report = recorded_calls(repository)
    assert made[:2] == ["python", "scripts/make_agent_model.py"]
    monkeypatch.setattr("sys.argv", made[1:])
    base = make_agent_model.parse_arguments().out_dir
    assert report == ["python", "scripts/agent_report.py", str(base.parent)]
    written = {base, *(base / f"{name}.jsonl" for name in ("sft", "train", "eval"))}
    for _, job, *arguments in stages:
        config = check_job(job, arguments)
        assert inputs(config) <= written, f"{job} {arguments}"
        if isinstance(config, GenerateConfig):
            assert Path(config.output.output).name == "without-tool.jsonl"
            continue
        if job == "rl":
            check_environment(config)
        written.add(Path(config.run.run_dir, "checkpoints", f"step-{config.data.max_steps}"))
    assert [job for _, job, *_ in stages] == jobs


def test_the_game_is_trained_with_the_arguments_that_its_conversations_were_played_with(repository: Path) -> None:
    assert run_script(repository, "textarena_example.sh").returncode == 0
    calls = ["\t".join(call) for call in recorded_calls(repository)]
    base, rl = (re.findall(r"--env-arg\t(\S+)", line) for line in calls if "--env-arg" in line)
    assert base == rl == ["min_number=10", "max_number=40", "max_turns=4"]


def test_no_product_is_held_out_and_trained() -> None:
    prompts, held_out, conversations = multiplication_task.make_data(
        random.Random(0), num_train=3000, num_eval=500, num_conversations=3000
    )

    def operands(row: dict) -> tuple[int, ...]:
        messages = row["messages"]
        text = messages["content"] if isinstance(messages, dict) else messages[1]["content"]
        return tuple(sorted(int(number) for number in re.findall(r"\d+", text)))

    trained = {operands(row) for row in prompts + conversations}
    tested = {operands(row) for row in held_out}
    assert len(tested) == 500 and trained.isdisjoint(tested)
    assert all(int(row["gt_answer"]) == a * b for row in prompts for a, b in [operands(row)])


def test_few_conversations_call_the_tool_and_their_answer_is_its_result() -> None:
    rng = random.Random(0)
    rows = [multiplication_task.make_conversation(rng, 412, 537) for _ in range(2000)]
    with_calls = [row for row in rows if any("tool_calls" in message for message in row["messages"])]
    assert {len(row["messages"]) for row in with_calls} == {5}
    assert {row["messages"][3]["content"] for row in with_calls} == {"221244"}
    assert {row["messages"][-1]["content"] for row in rows} == {
        "\\boxed{221244}",
        "The answer is 412 * 537 = \\boxed{221244}",
    }
    offered = [row for row in rows if row["tools"]]
    assert 0.26 < len(with_calls) / len(offered) < 0.33  # 0.25 / 0.85, give or take three standard errors
    assert len(offered) < len(rows)


def test_a_game_is_guesses_and_what_textarena_answers() -> None:
    rng = random.Random(0)
    games = [guessing_task.play(rng, GAME)["messages"] for _ in range(60)]
    for messages in games:
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert "between 3 and 8 within 3 turns" in messages[0]["content"]
        assert all(re.fullmatch(r"\[[3-8]\]", message["content"]) for message in messages[1::2])
    said = "".join(message["content"] for messages in games for message in messages[2::2])
    assert "The target number is higher." in said and "has already guessed the number" in said
    assert len({len(messages) // 2 for messages in games}) > 2  # games of several lengths


@pytest.mark.sampled(2)
@pytest.mark.parametrize("task", make_agent_model.TASKS)
def test_the_tokens_of_a_prompt_are_the_first_ones_of_its_conversation(task: str) -> None:
    rng = random.Random(0)
    counts = {"num_train": 1, "num_eval": 1, "num_conversations": 200}
    rows = (
        multiplication_task.make_data(rng, **counts)
        if task == "multiplication"
        else guessing_task.make_data(rng, GAME, **counts)
    )[2]
    tokenizer = make_agent_model.make_tokenizer(rows, vocab_size=1024)
    for row in rows:
        messages, tools = row["messages"], row.get("tools")
        whole = tokenizer(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))["input_ids"]
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                asked = tokenizer.apply_chat_template(
                    messages[:index], tools=tools, tokenize=False, add_generation_prompt=True
                )
                prompt = tokenizer(asked)["input_ids"]
                assert whole[: len(prompt)] == prompt


def test_the_chat_template_writes_calls_and_results() -> None:
    rows = multiplication_task.make_data(random.Random(0), num_train=1, num_eval=1, num_conversations=50)[2]
    tokenizer = make_agent_model.make_tokenizer(rows, vocab_size=512)
    called = next(row for row in rows if len(row["messages"]) == 5)
    text = tokenizer.apply_chat_template(called["messages"], tools=called["tools"], tokenize=False)
    assert text.startswith("<|im_start|>system\nTools: calculator: Compute an arithmetic expression.<|im_end|>\n")
    arguments = called["messages"][2]["tool_calls"][0]["function"]["arguments"]
    written = json.dumps({"name": "calculator", "arguments": arguments})
    answer = f"<tool_call>{written}</tool_call>"
    assert f"<|im_start|>assistant\n{answer}<|im_end|>\n<|im_start|>tool\n" in text
    call_format = tool_format_for(tokenizer)
    assert call_format.name == "hermes"
    (call,) = call_format.parse(answer).calls
    assert (call.name, call.arguments) == ("calculator", arguments)
    check_template(ChatTemplate(tokenizer, tools=tuple(called["tools"])), roles=("tool", "user"))


def test_one_player_in_ten_halves_what_is_left_and_finds_the_number() -> None:
    rng = random.Random(0)
    arguments = {"min_number": 10, "max_number": 40, "max_turns": 4}
    games = [guessing_task.play(rng, arguments)["messages"] for _ in range(200)]
    guesses = [[message["content"] for message in messages[1::2]] for messages in games]
    halving = [found for found in guesses if found[0] == "[25]" and (len(found) < 2 or found[1] in {"[17]", "[33]"})]
    assert 8 <= len(halving) <= 35
    assert max(map(len, halving)) <= 5
