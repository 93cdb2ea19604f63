"""Test that a checkpoint's tokenizer renders and tokenises as the model's, and that one that would not is refused."""

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers
from transformers import AutoTokenizer

from coati_rl.checkpoint import tokenizer_files
from coati_rl.checkpoint.tokenizer_files import read_tokenizer_files, write_files
from coati_rl.config.cli import parse, parse_job
from coati_rl.config.commands import OFFLINE
from coati_rl.config.offline_rules import check_offline
from coati_rl.errors import ConfigError
from coati_rl.preflight import prepare_offline, saved_tokenizer
from coati_rl.preflight.prepare import encoded_prompts
from coati_rl.preflight.prepare_offline import DatasetPreparation
from coati_rl.preflight.prompts import RewardFacts, load_run_rows
from coati_rl.preflight.resources import read_tokenizer
from coati_rl.reading.forms import Conversation
from coati_rl.reading.offline_samples import sft_samples
from tests.unit.preflight.tokenizer_kinds import KINDS, with_named_templates, with_tekken
from tests.unit.producer.chat_families import TOOL, template_text

TURNS = [{"role": "user", "content": "1 + 1 = ?"}, {"role": "assistant", "content": "Two, Zwölf\n"}]
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
ROWS = [
    {"messages": TURNS},
    {"messages": [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}], "tools": [TOOL]},
]
CONFIG = {"model_type": "qwen3", "vocab_size": 600, "max_position_embeddings": 4096, "transformers_version": "4.57.0"}


@pytest.fixture
def make(tmp_path):
    """kind -> a model's directory without weights, whose tokenizer's files are of this kind."""

    def of_kind(kind, **config):
        directory = tmp_path / "model"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
        KINDS[kind](directory)
        return directory

    return of_kind


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """(model, flags) -> sft on the rows, prepared for the CPU; sizes of memory are not asked for, there is no model."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("coati_rl.preflight.preparation.check_memory", lambda *_, **__: ((), ()))

    def run(model, *flags, job="sft", rows=ROWS):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        argv = ["-m", str(model), "-tbs", "2", "-d", str(tmp_path / "rows.jsonl"), *flags]
        config = parse_job(argv, OFFLINE[job])[0]
        check_offline(config)
        return DatasetPreparation(
            check_layout=lambda *_, **__: None, try_model=lambda *_, **__: 0.0, is_dry_run=True
        ).prepare(config)

    return run


def as_saved(model, directory, chat_template=None):
    """Write what a checkpoint holds of the tokenizer."""
    directory.mkdir()
    write_files(directory, read_tokenizer_files(model, chat_template=chat_template))
    config = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "transformers_version": "5.19.0"}))
    return directory


def arrays(job):
    return [(sample.token_ids.tolist(), sample.loss_mask.tolist()) for sample in job.train]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_gives_the_tokens_and_masks_of_its_model(make, prepared, tmp_path, kind):
    model = make(kind, model_type={"tekken": "mistral", "sentencepiece": "llama"}.get(kind, "qwen3"))
    of_model = prepared(model)
    assert len(of_model.train) == 2 and all(sample.num_loss_tokens for sample in of_model.train)
    assert arrays(prepared(as_saved(model, tmp_path / "saved"))) == arrays(of_model)


@pytest.mark.parametrize("kind", ["named templates", "templates in its config"])
def test_the_template_of_the_flag_is_the_only_one_of_a_checkpoint(make, prepared, tmp_path, kind):
    model, template = make(kind), template_text("qwen3").replace("<|im_start|>", "<|im_start|>!")
    of_model = prepared(model, "--chat-template", template)
    saved = as_saved(model, tmp_path / "saved", template)
    assert read_tokenizer(saved).chat_template == template
    assert arrays(prepared(saved)) == arrays(of_model) != arrays(prepared(model))


def test_a_lost_template_is_refused_before_anything_starts(make, prepared, monkeypatch):
    """As a list of names would lose it; the message names what differs."""
    model = make("named templates")
    monkeypatch.setattr(tokenizer_files, "TEMPLATES_DIR", "elsewhere")
    with pytest.raises(ConfigError, match="the tokenizer that its checkpoints would hold has another chat template"):
        prepared(model)


def test_a_lost_vocabulary_is_refused_before_anything_starts(make, prepared, monkeypatch):
    model = make("vocabulary and merges")
    real = saved_tokenizer.read_tokenizer_files
    lost = lambda *args, **options: {  # noqa: E731
        name: content for name, content in real(*args, **options).items() if name != "added_tokens.json"
    }
    monkeypatch.setattr(saved_tokenizer, "read_tokenizer_files", lost)
    with pytest.raises(ConfigError, match="its checkpoints would hold"):
        prepared(model)


def test_rows_that_a_checkpoint_would_tokenise_otherwise_are_refused_by_name(make, prepared, monkeypatch):
    """The same vocabulary, special tokens and templates, and another pre-tokenizer."""
    model = make("named templates")
    real = saved_tokenizer.read_tokenizer_files

    def splitting(*args, **options):
        files = real(*args, **options)
        whole = json.loads(files["tokenizer.json"])
        whole["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, whole["pre_tokenizer"]],
        }
        whole["model"]["merges"] = []
        return {**files, "tokenizer.json": json.dumps(whole).encode()}

    monkeypatch.setattr(saved_tokenizer, "read_tokenizer_files", splitting)
    with pytest.raises(
        ConfigError, match=r"makes other tokens of --dataset .*rows.jsonl, line 1 \(\d+, and the model's"
    ):
        prepared(model)


def test_the_samples_of_every_job_are_compared(make, prepared, monkeypatch):
    """Also those of KTO, whose first rows may all have the same prompt."""
    model, seen = make("named templates"), []
    real = prepare_offline.tokens_of
    monkeypatch.setattr(prepare_offline, "tokens_of", lambda *args: seen.append(args[1]) or real(*args))
    rows = [{"prompt": "q", "completion": f"a{i}", "label": True} for i in range(40)]
    rows += [{"prompt": "r", "completion": "b", "label": False}]
    prepared(model, job="kto", rows=rows)
    assert len(seen) == 2 * 16
    pairs = [{"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [{"role": "assistant", "content": "no"}]}] * 2
    for job, some in (("dpo", pairs), ("rm", pairs)):
        seen.clear()
        prepared(model, job=job, rows=some)
        assert len(seen) == 4


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The tokenizers of a model with named templates and of its checkpoint."""
    directory = tmp_path_factory.mktemp("both")
    (directory / "model").mkdir()
    (directory / "model/config.json").write_text(json.dumps(CONFIG))
    with_named_templates(directory / "model")
    return [read_tokenizer(each) for each in (directory / "model", as_saved(directory / "model", directory / "saved"))]


@pytest.mark.full
@settings(max_examples=25)
@given(
    texts=st.tuples(*[st.text(max_size=12) | st.just("2026-01-31 <|im_end|> \n\n 1.50 é")] * 4),
    arguments=st.none() | st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
    is_two_turns=st.booleans(),
)
def test_a_checkpoint_gives_the_tokens_and_masks_of_its_model_for_any_row(both, texts, arguments, is_two_turns):
    roles = ("user", "assistant") * (2 if is_two_turns else 1)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    if arguments is not None:
        messages[-1]["tool_calls"] = [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
    form = Conversation(messages=tuple(messages), tools=() if arguments is None else (TOOL,))
    (own,), (its,) = (sft_samples([form], each, max_length=9999, loss_on="last").samples for each in both)
    assert own.token_ids.tolist() == its.token_ids.tolist()
    assert own.loss_mask.tolist() == its.loss_mask.tolist() and own.num_loss_tokens


def test_tekken_gives_the_tokens_of_mistrals_own_class(make):
    model = make("tekken", model_type="mistral")
    own, mistrals = read_tokenizer(model), AutoTokenizer.from_pretrained(model)
    for tools in (None, [TOOL]):
        tokens = [
            each.apply_chat_template(TURNS[:1], tools=tools, add_generation_prompt=True, return_dict=True)["input_ids"]
            for each in (own, mistrals)
        ]
        assert tokens[0] == tokens[1]


def test_the_prompts_of_runs_are_compared(model_dir, tokenizer, monkeypatch, tmp_path):
    other = copy.deepcopy(tokenizer)
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    monkeypatch.setattr(saved_tokenizer, "_as_saved", lambda *_: other)
    (tmp_path / "rows.jsonl").write_text(
        '{"messages": "small", "gt_answer": "1"}\n{"messages": "Large", "gt_answer": "1"}\n'
    )
    config = parse(["-m", str(model_dir), "-d", str(tmp_path / "rows.jsonl"), "-rt", "think_answer_tags"])[0]
    facts = RewardFacts(default_system_prompt=lambda _: "", needs_ground_truth=lambda _: False)
    rows = load_run_rows(config, facts)
    with pytest.raises(ConfigError, match="makes other tokens of train, prompt 2"):
        saved_tokenizer.check_saved_tokenizer(config, tokenizer, lambda each: encoded_prompts(config, rows, each))


def test_tekken_without_mistral_common_is_refused_with_what_it_needs(make, prepared, monkeypatch):
    model = make("tekken", model_type="mistral")
    from transformers.integrations.mistral import tokenizer

    def missing(*_):
        raise ImportError("MistralConverter requires the mistral-common library")

    monkeypatch.setattr(tokenizer, "convert_tekken_tokenizer", missing)
    with pytest.raises(ConfigError, match=r"its tekken\.json needs mistral-common; install it"):
        prepared(model)


def test_hugging_faces_files_are_read_where_a_directory_has_mistrals_too(make, prepared):
    """Mistral's own class has neither a template nor offsets."""
    model = make("named templates", model_type="mistral")
    with_tekken(model)
    tokenizer = read_tokenizer(model)
    assert tokenizer.is_fast and tokenizer.convert_tokens_to_ids("<|im_end|>") is not None
    assert len(prepared(model).train) == 2
