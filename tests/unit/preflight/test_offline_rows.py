"""Test the rows of each job on a dataset: from the flags that name columns and sources to samples."""

import pytest

from coati_rl.batching.dataset_source import DatasetSource
from coati_rl.config.cli import parse_job
from coati_rl.config.commands import OFFLINE
from coati_rl.errors import ConfigError
from coati_rl.preflight.offline_rows import TRAIN_FLAG, load_forms, make_samples, needs_chat_template
from coati_rl.preflight.prepare_offline import DatasetPreparation, dataset_settings
from coati_rl.work import TrainWork

PAIR = {"ask": "1+1?", "good": "2", "bad": "3"}


@pytest.fixture
def samples_of(tokenizer):
    def make(job, dataset, flags=""):
        config = parse_job(["-m", "model", "-d", dataset, *flags.split()], OFFLINE[job])[0]
        forms = load_forms(config, config.data.dataset, flag=TRAIN_FLAG)
        return config, make_samples(config, forms, tokenizer, flag=TRAIN_FLAG)

    return make


def learned(sample, tokenizer):
    return tokenizer.decode(sample.token_ids[sample.loss_mask], skip_special_tokens=True).strip()


@pytest.mark.parametrize(
    ("job", "row", "flags", "texts"),
    [
        ("sft", {"ask": "1+1?", "answer": "2"}, "--prompt-key ask --output-key answer", ["2"]),
        ("sft", {"ask": "1+1?", "answer": "2"}, "--input-key ask --output-key answer --input-template {}", ["2"]),
        ("dpo", PAIR, "--prompt-key ask --chosen-key good --rejected-key bad", ["2", "3"]),
        ("kto", PAIR, "--prompt-key ask --chosen-key good --rejected-key bad", ["2", "5", "3", "5"]),
        ("kto", {"ask": "1+1?", "said": "2", "ok": 1}, "--prompt-key ask --output-key said --label-key ok", ["2", "5"]),
    ],
)
def test_each_job_reads_the_columns_that_its_flags_name(write, samples_of, tokenizer, job, row, flags, texts):
    other = {key: {"1+1?": "2+3?", "2": "5", "3": "6"}.get(value, value) for key, value in row.items()}
    _, made = samples_of(job, write("a", row, other), flags)
    assert [learned(sample, tokenizer) for sample in made.samples][: len(texts)] == texts


def test_a_flag_of_another_job_is_refused_by_name(samples_of):
    with pytest.raises(ConfigError, match=r"--chosen-key: is a flag of coati-rl rm \| dpo \| kto, and coati-rl sft"):
        samples_of("sft", "a.jsonl", "--chosen-key good")


def test_pairs_that_prefer_nothing_and_rows_that_are_cut_are_counted(write, samples_of):
    row = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
    rows = [row, {**row, "rejected": "2"}, {**row, "chosen": "1" * 99}, {**row, "prompt": "1" * 99}]
    _, made = samples_of("dpo", write("a", *rows), "--max-length 60")
    counts = made.counts
    assert (counts.num_rows, counts.num_equal, counts.num_cut, counts.num_left_out) == (2, 1, 1, 1)


def test_sources_are_mixed_by_their_shares_in_the_work_of_trainers(write, samples_of, tokenizer):
    few, many = write("few", *({"text": "a" * n} for n in (2, 3))), write("many", *({"text": "b"} for _ in range(30)))
    config, made = samples_of("sft", f"{few}=1,{many}=1", "-tbs 8 -e 2 --max-samples 14")
    assert (made.mixing.sizes, len(made.samples)) == ((2, 14), 16)
    source = DatasetSource(made.samples, dataset_settings(config, made.mixing))
    works = [source.next_work(index, rank=0, timeout_s=0.0) for index in range(4)]
    for work in works:
        assert isinstance(work, TrainWork)
        texts = [tokenizer.decode(ids) for ids in work.batch.samples.split().token_ids]
        assert sum("a" in text for text in texts) == 4


def test_a_source_of_which_nothing_can_be_trained_has_no_share(write, samples_of):
    good, long = (
        write("good", {"prompt": "1", "completion": "2"}),
        write("long", {"prompt": "1" * 99, "completion": "2"}),
    )
    with pytest.raises(ConfigError, match=r"long.jsonl: none of its rows has anything to train within --max-length 60"):
        samples_of("sft", f"{good}=1,{long}=1", "--max-length 60")


def test_messages_need_a_chat_template_and_text_does_not(write):
    def needs(row, flags=""):
        config = parse_job(["-m", "model", "-d", write("a", row), *flags.split()], OFFLINE["sft"])[0]
        return needs_chat_template(load_forms(config, config.data.dataset, flag=TRAIN_FLAG))

    assert needs({"prompt": "1", "completion": "2"}) and not needs({"text": "1"})
    assert not needs({"prompt": "1", "completion": "2"}, "--input-template {}")


@pytest.mark.parametrize(
    ("job", "rows", "flags", "message"),
    [
        ("dpo", [{"prompt": "a", "chosen": "", "rejected": "b"}], "", "line 1: its chosen is empty"),
        ("rm", [{"prompt": "a", "chosen": "b"}], "", "line 1: has prompt, chosen, which is no row of coati-rl rm"),
        ("dpo", [{"prompt": "a", "chosen": "b", "rejected": "b"}] * 2, "", "of 2 pairs chosen equals rejected"),
        ("kto", [{"prompt": "a", "completion": "b", "label": "maybe"}], "", "line 1: its label is 'maybe'; write true"),
        ("sft", [{"messages": [{"role": "user", "content": "a"}]}], "", "line 1: no message has the role assistant"),
        ("sft", [{"prompt": "robot", "completion": "b"}], "--chat-template {{raise_exception(messages[0].content)}}",
         "line 1: the model's chat template refuses it: robot"),
        ("sft", [{"text": "a"}], "--chat-template {%x", "--chat-template, line 1: is no Jinja template"),
        ("prm", [{"prompt": "a", "completions": ["b"], "labels": ["?"]}], "", "line 1: label 1 is '?'; write true"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_starts(write, model_dir, job, rows, flags, message):
    dataset = write("rows", *rows)
    argv = ["-m", str(model_dir), "-d", dataset, *flags.split(), "--device", "cpu", "-tbs", "1"]
    with pytest.raises(ConfigError) as caught:
        DatasetPreparation(
            check_layout=lambda *_: None,
            try_model=lambda *_, **__: 0.0,
            is_dry_run=False,
        ).prepare(parse_job(argv, OFFLINE[job])[0])
    assert (f"--dataset {dataset}, {message}" if message.startswith("line") else message) in str(caught.value)
