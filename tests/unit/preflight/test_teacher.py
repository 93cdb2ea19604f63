"""Test which teachers a policy can be distilled from: vocabulary, logits, positions, layout, and that it is there."""

import json
import shutil

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from coati_rl.config.cli import parse
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError
from coati_rl.preflight.prepare import RunPreparation
from coati_rl.preflight.prompts import RewardFacts
from coati_rl.preflight.same_tokens import check_vocabulary, check_vocabulary_sizes
from consumer.parallel.layout_rules import check_layout
from consumer.proofs.model import try_model

SIZES = "-t 1 -i 1 -ibs 2 -imbs 1 -tbs 2 -tMbs 1 -tmbs 1 -g 2 -mpt 128 -mnt 64 --device cpu"


@pytest.fixture
def prepare_with(model_dir, tmp_path):
    row = {"messages": {"role": "user", "content": "x"}, "gt_answer": "1"}
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    facts = RewardFacts(default_system_prompt=lambda _: "", needs_ground_truth=lambda _: False)

    def run(flags, *, model=model_dir, is_dry_run=False):
        config = parse(["-m", str(model), "-d", str(tmp_path / "train.jsonl"), *SIZES.split(), *flags.split()])[0]
        check(config)
        return RunPreparation(
            rewards=facts, check_layout=check_layout, try_model=try_model, is_dry_run=is_dry_run
        ).prepare(config)

    return run


@pytest.fixture
def teacher_with(make_model_dir, tmp_path):
    """A copy of a model with other fields in its config.json, or other tokens."""

    def make(tokens=None, **fields):
        directory = tmp_path / "teacher"
        shutil.copytree(make_model_dir(1), directory)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | fields))
        if tokens:
            path = directory / "tokenizer.json"
            text = path.read_text()
            for old, new in tokens.items():
                assert text.count(f'"{old}": ') == 1
                text = text.replace(f'"{old}": ', f'"{new}": ')
            path.write_text(text)
        return directory

    return make


def test_a_teacher_with_the_models_tokenizer_is_taken_as_a_directory(prepare_with, teacher_with):
    directory = teacher_with()
    prepared = prepare_with(f"--teacher {directory}")
    assert prepared.config.distillation.teacher == str(directory)
    assert prepared.warnings == ()
    assert "1 x reverse KL to the teacher (token)" in str(prepared.plan.lines())


def test_another_vocabulary_is_refused_with_both_sizes_and_the_first_difference(prepare_with, teacher_with, model_dir):
    directory = teacher_with(tokens={"A": "AA", "B": "BB"})
    with pytest.raises(ConfigError) as caught:
        prepare_with(f"--teacher {directory}")
    message = str(caught.value)
    assert message.startswith(f"--teacher {directory}: its vocabulary of 257 tokens is not that of --model {model_dir}")
    assert "which has 257; the first difference is id 32: 'AA' there, 'A' of the model" in message


class Tokenizer:
    def __init__(self, **vocabulary):
        self.get_vocab = lambda: vocabulary


def test_tokens_that_only_one_of_both_has_are_a_difference():
    names = {"model": "m", "other": "--teacher t"}
    check_vocabulary(Tokenizer(a=0, b=1), Tokenizer(b=1, a=0), **names)
    with pytest.raises(ConfigError, match=r"of 3 tokens .* has 2; the first difference is id 2: 'c' .*, none of the m"):
        check_vocabulary(Tokenizer(a=0, b=1), Tokenizer(a=0, b=1, c=2), **names)
    with pytest.raises(ConfigError, match=r"of 1 tokens .* has 2; the first difference is id 1: none .*, 'b' of the m"):
        check_vocabulary(Tokenizer(a=0, b=1), Tokenizer(a=0), **names)


def test_embeddings_of_other_sizes_do_for_sampled_tokens_if_the_teachers_is_larger():
    check_vocabulary_sizes(8, 8, without_full="use x", other="--teacher t")
    check_vocabulary_sizes(8, 10, without_full=None, other="--teacher t")
    with pytest.raises(ConfigError, match=r"--teacher t: .* it has 10 logits, the model 8; use x, or use another one"):
        check_vocabulary_sizes(8, 10, without_full="use x", other="--teacher t")
    with pytest.raises(ConfigError, match="--teacher t: has logits for 8 tokens, and the model for 10"):
        check_vocabulary_sizes(10, 8, without_full=None, other="--teacher t")


@pytest.mark.parametrize(
    ("fields", "flags", "message"),
    [
        (
            {"max_position_embeddings": 100},
            "",
            "--teacher ",
        ),
        ({"vocab_size": 280}, "--distill-kl full", "--teacher "),
        ({"num_attention_heads": 3}, "-t 2 -tp 2", "-tp 2: must divide num_attention_heads 3"),
    ],
)
def test_a_teacher_that_does_not_fit_the_run_is_refused_by_name(prepare_with, teacher_with, fields, flags, message):
    student = {"num_key_value_heads": 2} if "-tp" in flags else {}
    directory = teacher_with(**student, **fields)
    model = directory.parent / "model"
    shutil.copytree(directory, model)
    config = json.loads((model / "config.json").read_text())
    whole = {"max_position_embeddings": 1024, "vocab_size": 272, "num_attention_heads": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config | whole)).save_pretrained(model)
    with pytest.raises(ConfigError) as caught:
        prepare_with(f"--teacher {directory} {flags}", model=model)
    assert str(caught.value).startswith(message)
    assert f"--teacher {directory}" in str(caught.value) and "--model" not in str(caught.value)


def test_a_teacher_that_is_not_there_is_refused_and_in_a_dry_run_not_fetched(prepare_with, tmp_path):
    with pytest.raises(ConfigError, match=f"--teacher {tmp_path}/none: no such directory; give a model directory or a"):
        prepare_with(f"--teacher {tmp_path}/none")
    (warning,) = prepare_with("--teacher owner/teacher", is_dry_run=True).warnings
    assert warning.startswith("--teacher owner/teacher is not on this machine: vocabulary and layout are not checked")
