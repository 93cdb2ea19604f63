"""Test the preparation of jobs on a dataset: samples, plan, and the refusal of wrong rows before anything starts."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coati_rl.config.cli import parse_job
from coati_rl.config.commands import OFFLINE
from coati_rl.config.offline_rules import check_offline
from coati_rl.errors import ConfigError
from coati_rl.preflight.prepare_offline import DatasetPreparation
from consumer.__main__ import _main, main
from consumer.parallel.layout_rules import check_layout
from consumer.proofs.model import try_model

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]  # u:q\na:answer\n: 13 tokens
PAIR = {"prompt": "q", "chosen": "yes", "rejected": "no"}


@pytest.fixture
def prepared(model_dir, tmp_path, monkeypatch):
    """(job, rows, flags) -> the job, prepared for the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(job, rows, *flags, held_out=None, is_dry_run=False, model=model_dir):
        argv = ["-m", str(model), "-tbs", "2", *map(str, flags)]
        for flag, name, each in (("-d", "train.jsonl", rows), ("-ed", "held.jsonl", held_out)):
            if each is not None:
                (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in each))
                argv += [flag, str(tmp_path / name)]
        config = parse_job(argv, OFFLINE[job])[0]
        check_offline(config)
        return DatasetPreparation(check_layout=check_layout, try_model=try_model, is_dry_run=is_dry_run).prepare(config)

    return run


def test_the_plan_counts_rows_tokens_and_steps_and_what_was_cut(prepared):
    long = [TURNS[0], {"role": "assistant", "content": "x" * 40}]
    unreachable = [{"role": "user", "content": "x" * 40}, TURNS[1]]
    rows = [{"messages": each} for each in (TURNS, TURNS, TURNS, long, unreachable)]
    job = prepared("sft", rows, "--max-length", 20, "-e", 2, held_out=[{"messages": TURNS}])
    text = "\n".join(job.plan.lines())
    assert "4; 59 tokens" in text and "1 cut to --max-length" in text
    assert "1 left out, as nothing trained is within --max-length" in text
    assert "rows of eval            1; 13 tokens" in text
    assert job.plan.num_steps == 4 and len(job.train) == 4 and len(job.evaluation["eval"]) == 1
    assert "optimizer steps         2 (1 rows at the end fill no step)" in "\n".join(
        prepared("sft", rows[:3] + rows[:2], "--max-length", 20).plan.lines()
    )


def test_on_gpus_the_layout_is_chosen_with_the_tokens_of_a_micro_batch(prepared):
    rows = [{"messages": TURNS}] * 4
    job = prepared("sft", rows, "-t", 2, "--device", "cuda", is_dry_run=True)
    parallel = job.config.parallel
    layout = (parallel.zero_stage, parallel.max_tokens_per_microbatch, parallel.gradient_checkpointing)
    assert layout == (1, 16384, True)
    (line,) = [each for each in job.plan.lines() if each.startswith("chosen")]
    assert line.endswith("with a tenth to spare; GPUs are taken to have 80.0 GiB, as theirs is unknown")
    assert prepared("sft", rows, "-t", 2).config.parallel.zero_stage == 0


def test_equal_completions_are_left_out_and_counted(prepared):
    job = prepared("dpo", [PAIR, PAIR, PAIR | {"rejected": "yes"}])
    assert len(job.train) == 4
    assert "1 pairs left out, as chosen equals rejected" in "\n".join(job.plan.lines())


def test_plain_text_needs_no_chat_template_and_messages_do(prepared, model_dir, tokenizer, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(model_dir, bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    assert len(prepared("sft", [{"text": "some text"}] * 2, model=bare).train) == 2
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        prepared("sft", [{"messages": TURNS}] * 2, model=bare)


@pytest.mark.parametrize(
    ("job", "row", "message"),
    [
        ("sft", {"messages": TURNS[:1]}, r"--dataset .*train.jsonl, line 2: .*assistant"),
        ("sft", {"question": "q"}, r"--dataset .*train.jsonl, line 2: "),
        ("sft", {"messages": [{"role": "judge", "content": "q"}, TURNS[1]]}, r"line 2: .* refuses it: unknown role"),
        ("dpo", {"prompt": "q", "chosen": "", "rejected": "no"}, r"line 2: .*chosen"),
        ("rm", {"prompt": "q", "chosen": "a"}, r"line 2: "),
        ("kto", {"prompt": "q", "completion": "a", "label": "maybe"}, r"line 2: .*label"),
        ("prm", {"prompt": "q", "completions": ["a", "b"], "labels": [True]}, r"line 2: .*label"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_trained_on_is_named(prepared, job, row, message):
    good = {
        "sft": {"messages": TURNS},
        "dpo": PAIR,
        "rm": PAIR,
        "kto": {"prompt": "q", "completion": "a", "label": True},
        "prm": {"prompt": "q", "completions": ["a"], "labels": [True]},
    }[job]
    with pytest.raises(ConfigError, match=message):
        prepared(job, [good, row])


def test_a_template_of_text_beside_rows_of_messages_is_refused(prepared):
    with pytest.raises(ConfigError, match=r"--input-template is for prompts that are text, and --dataset has rows of"):
        prepared("sft", [{"messages": TURNS}] * 2, "--input-template", "{}")
    assert len(prepared("dpo", [PAIR] * 2, "--input-template", "Q: {}").train) == 4


def test_labels_of_a_process_reward_model_that_are_no_tokens_are_refused_before_anything_starts(prepared):
    row = {"prompt": "q", "completions": ["a"], "labels": [True]}
    with pytest.raises(ConfigError, match="--reward-tokens 'right_step' is 10 tokens of this model"):
        prepared("prm", [row] * 2, "--reward-tokens=right_step", "--reward-tokens=wrong_step")


def test_too_few_rows_for_a_step_are_refused_with_sizes_that_fit(prepared):
    with pytest.raises(
        ConfigError, match=r"1 usable rows x 1 epoch\(s\) do not fill one optimizer step of tbs \* dp = 2"
    ):
        prepared("sft", [{"messages": TURNS}])
    with pytest.raises(ConfigError, match="no row can be trained on: 2 have nothing to train within --max-length 4"):
        prepared("sft", [{"messages": TURNS}] * 2, "--max-length", 4)


def test_the_default_length_is_at_most_the_models_positions_and_one_that_is_given_is_refused(prepared):
    rows = [{"messages": TURNS}] * 2
    assert prepared("sft", rows).config.data.max_length == 1024
    with pytest.raises(ConfigError, match="--max-length 1025 exceeds the 1024 positions of --model"):
        prepared("sft", rows, "--max-length", 1025)


def test_a_reference_model_that_cannot_score_the_samples_is_refused(prepared, model_dir, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    config = json.loads((model_dir / "config.json").read_text())
    for changes, message in (
        ({"vocab_size": 100}, r"--reference-model .*: has logits for 100 tokens, and the model for 272"),
        ({"max_position_embeddings": 64}, r"--reference-model .*: has 64 positions, and a sample may have 1024 tokens"),
    ):
        (other / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ConfigError, match=message):
            prepared("dpo", [PAIR] * 2, "--reference-model", other)
    larger = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config | {"vocab_size": 999}))
    larger.save_pretrained(other)
    assert prepared("dpo", [PAIR] * 2, "--reference-model", other).config.reference_model == str(other), "filled up"
    tokens = other / "tokenizer.json"
    tokens.write_text(tokens.read_text().replace('"A": ', '"AA": '))
    with pytest.raises(ConfigError, match=r"--reference-model .*: its vocabulary .*'AA' there, 'A' of the model"):
        prepared("dpo", [PAIR] * 2, "--reference-model", other)
    with pytest.raises(ConfigError, match=r"--reference-model no/where/at/all: no such directory"):
        prepared("dpo", [PAIR] * 2, "--reference-model", "no/where/at/all")
    warnings = prepared("dpo", [PAIR] * 2, "--loss", "orpo", "--reference-model", other).warnings
    assert warnings == ("--reference-model: has no effect, as orpo of pairs needs no reference model",)


def test_a_dry_run_without_the_model_checks_the_rows_alone(prepared):
    job = prepared("sft", [{"messages": TURNS}], is_dry_run=True, model="owner/name")
    assert job.plan.num_steps is None and "model owner/name is not on this machine" in job.warnings[0]
    assert "rows                    unknown" in job.plan.lines()
    with pytest.raises(ConfigError, match="line 1"):
        prepared("sft", [{"messages": TURNS[:1]}], is_dry_run=True, model="owner/name")


FROM_PRETRAINED = PreTrainedModel.from_pretrained.__func__


def compare_or_fail(cls, name, **arguments):
    """What reads a model's names alone has no memory for it."""
    assert name is None and arguments["device_map"] == {"": "meta"}, "a model was loaded"
    return FROM_PRETRAINED(cls, name, **arguments)


@pytest.fixture
def run_command(monkeypatch, tmp_path, capsys):
    """(job, arguments) -> exit code and messages; nothing may be started."""

    def run(job, *arguments):
        code = _main(OFFLINE[job], [*map(str, arguments), "--run-dir", str(tmp_path / "run")], tmp_path)
        assert not (tmp_path / "run").exists()
        return code, capsys.readouterr()

    monkeypatch.setattr("coati_rl.driver.command.prepare_ray_environment", lambda config: pytest.fail("it was started"))
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(compare_or_fail))
    return run


def test_a_command_refuses_wrong_rows_and_flags_with_exit_code_2_and_its_own_name(run_command, model_dir, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": TURNS[:1]}) + "\n")
    code, output = run_command("sft", "-m", model_dir, "-d", tmp_path / "rows.jsonl")
    assert code == 2 and output.out == ""
    assert output.err.startswith(f"coati-rl sft: --dataset {tmp_path}/rows.jsonl, line 1: ")
    code, output = run_command("dpo", "-m", model_dir, "--kl-coeff", "0")
    assert (code, output.err) == (
        2,
        "coati-rl dpo: --kl-coeff: is a flag of coati-rl rl, and coati-rl dpo lacks it\n",
    )


LABELLED = {"prompt": "q", "completion": "a", "label": True}
STEPS = {"prompt": "q", "completions": ["a"], "labels": [True]}
GOOD = {"sft": {"messages": TURNS}, "rm": PAIR, "dpo": PAIR, "kto": LABELLED, "prm": STEPS}
OF_ASKED = [{"role": "user", "content": "q"}, {"role": "judge", "content": "fine"}]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("flag", ["--dataset", "--eval-dataset eval"])
@pytest.mark.parametrize(
    ("job", "row", "message"),
    [
        *((job, PAIR | {"chosen": " "}, "its chosen is empty; write the completion") for job in ("rm", "dpo", "kto")),
        ("dpo", PAIR | {"rejected": ""}, "its rejected is empty; write the completion, or leave the row out"),
        ("sft", {"prompt": "q", "completion": ""}, "its completion is empty; write the completion"),
        ("kto", LABELLED | {"label": "good"}, "its label is 'good'; write true or false (or 1 or 0)"),
        ("kto", LABELLED | {"label": 0.7}, "its label is 0.7; write true or false (or 1 or 0)"),
        ("prm", STEPS | {"labels": ["yes"]}, "label 1 is 'yes'; write true or false (or 1 or 0)"),
        ("sft", {"messages": TURNS[:1]}, "no message has the role assistant; every row needs one"),
        ("dpo", {"messages": TURNS[:1], "chosen": TURNS[:1], "rejected": "a"}, "one of chosen and rejected is text"),
        ("sft", {"messages": [*OF_ASKED, TURNS[1]]}, "the model's chat template refuses it: unknown role"),
        ("kto", LABELLED | {"prompt": OF_ASKED}, "the model's chat template refuses it: unknown role"),
        ("rm", PAIR | {"prompt": OF_ASKED}, "the model's chat template refuses it: unknown role"),
        ("prm", STEPS | {"prompt": OF_ASKED}, "the model's chat template refuses it: unknown role"),
    ],
)  # fmt: skip
def test_a_command_names_the_row_that_is_wrong_and_loads_no_model(
    run_command, model_dir, tmp_path, job, flag, row, message
):
    others = [GOOD[job], GOOD[job] | ({"prompt": "p"} if "prompt" in GOOD[job] else {})]
    files = {"--dataset": others, "--eval-dataset eval": others}
    files[flag] = [GOOD[job], row]
    for name, rows in files.items():
        (tmp_path / f"{name[2:6]}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    own = ["--placeholder-token", "#", "--reward-tokens", "+", "--reward-tokens=-"] if job == "prm" else []
    datasets = ["-d", tmp_path / "data.jsonl", "-ed", tmp_path / "eval.jsonl"]
    code, output = run_command(job, "-m", model_dir, *datasets, "-tbs", 1, "--device", "cpu", *own)
    where = f"coati-rl {job}: {flag} {tmp_path / f'{flag[2:6]}.jsonl'}, line 2: "
    assert (code, output.out) == (2, "")
    assert output.err.startswith(where + message) and output.err.count("\n") == 1, output.err


@pytest.mark.sampled(2)
@pytest.mark.parametrize("job", ["rm", "dpo", "kto"])
def test_a_command_counts_pairs_that_prefer_nothing_and_refuses_rows_of_nothing_else(
    run_command, model_dir, tmp_path, job
):
    equal, other = PAIR | {"rejected": PAIR["chosen"]}, PAIR | {"prompt": "p"}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (PAIR, equal, equal, other)))
    flags = ["-m", model_dir, "-d", path, "-tbs", 1, "--device", "cpu"]
    code, output = run_command(job, *flags, "--dry-run")
    assert code == 0 and "2 pairs left out, as chosen equals rejected" in output.out
    path.write_text(json.dumps(equal) + "\n")
    code, output = run_command(job, *flags)
    assert code == 2 and "no row can be trained on" in output.err and "of 1 pairs chosen equals" in output.err


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content + 1 }}", "line 1: the model's chat template refuses it: can only concatenate str"),
        ("{{ 1 // (messages | length - 2) }}", "line 1: the model's chat template refuses it: "),
        ("{% for", "--chat-template, line 1: is no Jinja template: "),
    ],
)
def test_a_command_refuses_a_template_that_fails_whatever_it_raises(
    run_command, model_dir, tmp_path, template, message
):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": TURNS}) + "\n")
    (tmp_path / "own.jinja").write_text(template)
    own = ["--chat-template", tmp_path / "own.jinja", "--device", "cpu"]
    code, output = run_command("sft", "-m", model_dir, "-d", tmp_path / "rows.jsonl", "-tbs", 1, *own)
    assert code == 2 and message in output.err and output.err.count("\n") == 1, output.err


def test_a_command_refuses_a_teacher_of_another_vocabulary_by_its_flag(run_command, model_dir, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"A": ', '"AA": '))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": TURNS}) + "\n")
    flags = ["-d", tmp_path / "rows.jsonl", "-tbs", 1, "--device", "cpu", "--teacher", other]
    code, output = run_command("sft", "-m", model_dir, *flags)
    assert code == 2 and output.err.startswith(f"coati-rl sft: --teacher {other}: its vocabulary of 257 tokens is not")


def test_a_dry_run_prints_the_plan_and_ends_with_0(run_command, model_dir, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(PAIR) + "\n")
    code, output = run_command("dpo", "-m", model_dir, "-d", tmp_path / "rows.jsonl", "-tbs", "1", "--dry-run")
    assert (code, output.err) == (0, "")
    assert "objective               dpo of pairs" in output.out and "optimizer steps         1" in output.out


def test_commands_of_the_package_are_listed_and_others_refused(capsys):
    assert main([]) == 0 and "sft|rm|dpo|kto|prm|value" in capsys.readouterr().out
    assert main(["ppo"]) == 2 and "no command 'ppo'; use one of sft, rm," in capsys.readouterr().err
