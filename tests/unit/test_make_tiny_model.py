"""Test the quickstart's task and tiny model: correct answers, the careless teacher, and the held-out split."""

import json
import random
import subprocess
import sys
from pathlib import Path

import code_task
import pytest
from arithmetic_task import Problem, distinct_problems, make_problem, needs_carry, problems, solve, split_pairs
from make_tiny_model import IM_END, conversation, make_tokenizer, tokenizer_texts, told
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_tiny_model.py"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    training_pairs, _ = split_pairs(random.Random(0))
    return make_tokenizer(
        tokenizer_texts(distinct_problems(training_pairs, random.Random(0), count=500)), vocab_size=512
    )


def test_a_carry_is_worked_out_or_forgotten() -> None:
    assert solve(27, 45, sign=1) == ("27 + 45 = 60 + 12 = \\boxed{72}", 72)
    assert solve(27, 45, sign=1, is_careless=True) == ("27 + 45 = 60 + 12 = \\boxed{62}", 62)
    assert solve(72, 45, sign=-1) == ("72 - 45 = 30 - 3 = \\boxed{27}", 27)
    assert solve(72, 45, sign=-1, is_careless=True) == ("72 - 45 = 30 - 3 = \\boxed{33}", 33)


def test_without_a_carry_the_careless_way_is_right() -> None:
    assert solve(23, 45, sign=1, is_careless=True) == solve(23, 45, sign=1) == ("23 + 45 = 60 + 8 = \\boxed{68}", 68)
    assert not needs_carry(23, 45, sign=1)
    assert needs_carry(27, 45, sign=1)


def test_the_answer_is_right_even_when_the_teacher_is_not() -> None:
    rng = random.Random(0)
    for _ in range(200):
        problem = make_problem([(45, 72)], rng, careless_rate=1.0)
        assert problem.answer in {"117", "27"}
        assert problem.solution.endswith(("\\boxed{117}", "\\boxed{33}"))


def test_no_pair_of_operands_is_on_both_sides() -> None:
    training, held_out = split_pairs(random.Random(0))
    assert set(training).isdisjoint(held_out)
    assert len(training) + len(held_out) == 90 * 91 // 2  # unordered pairs of 10..99
    assert all(low <= high for low, high in training + held_out)


def test_prompts_are_distinct_and_the_same_for_the_same_seed() -> None:
    training, _ = split_pairs(random.Random(0))
    first = distinct_problems(training, random.Random(1), count=300)
    assert len({problem.question for problem in first}) == 300
    assert first == distinct_problems(training, random.Random(1), count=300)


def test_the_tokenizer_knows_every_text_and_splits_digits(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in ("Tom has 23 apples", "naïve 漢字 🦝\n\ttab", "\x00\x7f"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("2345")["input_ids"]) == 4
    assert tokenizer.convert_tokens_to_ids(IM_END) == tokenizer.eos_token_id
    assert tokenizer.unk_token is None


def test_the_chat_template_reads_like_qwens(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": Problem.system_prompt}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        f"<|im_start|>system\n{Problem.system_prompt}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.full
@pytest.mark.parametrize("is_tied", [pytest.param(True, marks=pytest.mark.full), False])
def test_the_checkpoint_is_an_ordinary_one(tmp_path: Path, is_tied: bool) -> None:
    flags = ["--tied" if is_tied else "--untied", "--steps", "2", "--num-train", "500", "--num-eval", "4"]
    flags += [] if is_tied else ["--num-conversations", "3"]
    run = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, *flags], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert "2 steps, greedy accuracy 0.0" in run.stdout
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == "qwen3"
    assert model.config.tie_word_embeddings is is_tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is is_tied
    assert 500_000 <= model.num_parameters() <= 3_000_000
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 4096
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert len(rows) == 500
    assert set(rows[0]) == {"messages", "gt_answer"}
    assert rows[0]["messages"]["role"] == "user"
    assert int(rows[0]["gt_answer"]) >= 10
    assert (tmp_path / "sft.jsonl").exists() is not is_tied


def test_a_conversation_is_the_prompt_of_a_run_with_the_teachers_solution() -> None:
    problem = Problem(question="What is 27 + 45?", solution="27 + 45 = \\boxed{62}", answer="72")
    assert conversation(problem) == {
        "messages": [
            {"role": "system", "content": Problem.system_prompt},
            {"role": "user", "content": "What is 27 + 45?"},
            {"role": "assistant", "content": "27 + 45 = \\boxed{62}"},
        ]
    }


def test_the_share_of_carries_is_what_the_warm_up_counts_on() -> None:
    training, _ = split_pairs(random.Random(0))
    stream = problems(training, random.Random(0), careless_rate=1.0)
    drawn = [next(stream) for _ in range(2000)]
    right = sum(problem.solution.endswith(f"\\boxed{{{problem.answer}}}") for problem in drawn)
    assert 0.34 < right / len(drawn) < 0.42  # 1 - CARRY_FRACTION, give or take three standard errors


def test_every_program_of_the_coding_task_passes_its_own_tests_and_fails_those_of_the_others() -> None:
    rng = random.Random(0)
    expressions = [expression for _, expression, _ in code_task.STORIES]
    for story, expression in enumerate(expressions):
        problem = code_task.make_problem(story, ("Ada", "nuts"), rng)
        pairs = [tuple(map(int, text.split())) for text in problem.inputs]
        passing = [
            other
            for other in expressions
            if [f"{eval(other, {'a': a, 'b': b})}\n" for a, b in pairs] == list(problem.outputs)
        ]
        assert passing == [expression]
        assert problem.solution == problem.ending == code_task.write_program(expression)


def test_the_careless_coder_adds_whatever_is_asked() -> None:
    problem = code_task.make_problem(1, ("Ada", "nuts"), random.Random(0), careless_rate=1.0)
    assert problem.solution == "```python\na = int(input())\nb = int(input())\nprint(a + b)\n```"
    assert problem.ending == "```python\na = int(input())\nb = int(input())\nprint(a - b)\n```"


def test_no_person_and_thing_of_the_coding_task_are_on_both_sides() -> None:
    prompts, held_out, _ = code_task.make_lessons(random.Random(0), num_train=9999, num_eval=9999, careless_rate=0.7)
    assert len(prompts) == 738 and len(held_out) == 126  # 123 and 21 pairs, six stories each
    assert {problem.question for problem in prompts}.isdisjoint(problem.question for problem in held_out)
    assert set(prompts[0].row()) == {"messages", "test_cases"}


def test_on_a_busy_machine_the_training_says_how_far_it_is(capsys) -> None:
    assert list(told(range(3), every_s=0.0)) == [0, 1, 2]
    assert capsys.readouterr().err == "".join(f"training: step {step} of 3\n" for step in range(3))
    assert list(told(range(3))) == [0, 1, 2] and capsys.readouterr().err == ""
