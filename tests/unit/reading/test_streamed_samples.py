"""Streamed samples of supervised fine-tuning: the same steps as without, from places alone."""

import json
import pickle
import random

import pytest

from coati_rl.batching.dataset_source import DatasetSource
from coati_rl.config.cli import build_job
from coati_rl.config.jobs.dpo import DpoJobConfig
from coati_rl.config.jobs.sft import SftJobConfig
from coati_rl.errors import ConfigError, RunError
from coati_rl.preflight.offline_rows import TRAIN_FLAG, load_forms, make_samples, needs_chat_template
from coati_rl.preflight.prepare_offline import dataset_settings
from coati_rl.reading.streamed_samples import StreamedSamples

SIZES = {"train_batch_size": 4, "train_microbatch_size": 2, "max_epochs": 2, "max_length": 60, "seed": 3}


def conversation(number, length):
    text = {"role": "user", "content": f"é{number}" * length}
    return {"messages": [text, {"role": "assistant", "content": "yes" * (number % 7 + 1)}]}


def rows_of(number, seed=0):
    pick = random.Random(seed)
    return [conversation(n, pick.randint(1, 20)) if n % 3 else {"text": f"Text {n}." * 4} for n in range(number)]


@pytest.fixture
def write(tmp_path):
    def make(name, rows):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n\n".join(map(json.dumps, rows)))
        return str(path)

    return make


def sets_of(tokenizer, **values):
    """The training samples and a source of them, without and with --streaming."""
    made = []
    for streaming in (False, True):
        config = build_job({**SIZES, **values, "streaming": streaming}, SftJobConfig)
        forms = load_forms(config, config.data.dataset, flag=TRAIN_FLAG)
        assert needs_chat_template(forms)
        samples = make_samples(config, forms, tokenizer, flag=TRAIN_FLAG)
        made.append((samples, DatasetSource(samples.samples, dataset_settings(config, samples.mixing))))
    return made


def fields_of(sample):
    arrays = [sample.prefix_ids.tolist(), sample.token_ids.tolist(), sample.loss_mask.tolist()]
    return (sample.uid, sample.number, arrays, dict(sample.arrays))


@pytest.mark.parametrize("with_shares", [False, True])
def test_samples_steps_and_counts_are_the_same_as_without_streaming(write, tokenizer, with_shares):
    paths = write("a", rows_of(40)), write("b", rows_of(25, seed=1))
    text = f"{paths[0]}=0.3,{paths[1]}=0.7" if with_shares else ",".join(paths)
    (plain, source), (streamed, of_places) = sets_of(tokenizer, dataset=text)
    assert isinstance(streamed.samples, StreamedSamples) and isinstance(plain.samples, tuple)
    assert plain.counts == streamed.counts and plain.counts.num_cut > 0 and plain.counts.num_left_out > 0
    assert plain.mixing == streamed.mixing and (plain.mixing is not None) is with_shares
    assert [fields_of(each) for each in streamed.samples] == [fields_of(each) for each in plain.samples]
    assert source.num_steps == of_places.num_steps > 10 and source.data_state(3) == of_places.data_state(3)
    for step in range(source.num_steps):
        assert source.statistics(step) == of_places.statistics(step)
        for first, second in zip(source.batches(step), of_places.batches(step), strict=True):
            assert pickle.dumps(first) == pickle.dumps(second)


@pytest.mark.full
def test_only_places_are_kept(write, tokenizer):
    _, (streamed, _) = sets_of(tokenizer, dataset=write("a", rows_of(500)))
    copied = pickle.loads(pickle.dumps(streamed.samples))
    assert [fields_of(copied[number]) for number in (7, 0)] == [fields_of(streamed.samples[n]) for n in (7, 0)]
    size = len(pickle.dumps(streamed.samples)) - len(pickle.dumps(tokenizer))
    assert size < 20 * 500 + 10_000


def test_a_wrong_row_is_found_before_anything_starts_and_a_changed_file_when_it_is_drawn(write, tokenizer):
    with pytest.raises(ConfigError, match=r"a.jsonl, line 3: no message has the role assistant"):
        sets_of(tokenizer, dataset=write("a", [rows_of(1)[0], {"messages": [{"role": "user", "content": "1"}]}]))
    path = write("a", rows_of(40))
    _, (_, source) = sets_of(tokenizer, dataset=path)
    write("a", rows_of(41))
    with pytest.raises(RunError, match=r"a.jsonl, line \d+: the file has changed"):
        source.batches(0)


def test_jobs_that_compare_rows_have_no_such_flag():
    with pytest.raises(ConfigError, match="streaming"):
        build_job({"streaming": True}, DpoJobConfig)
