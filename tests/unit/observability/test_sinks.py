"""Test where step records end up."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from coati_rl.config.cli import parse
from coati_rl.errors import ConfigError, RunError
from coati_rl.observability.sampled_answer import SampledAnswer
from coati_rl.observability.sinks import JsonlSink, TensorBoardSink, WandbSink, open_sinks


def test_every_record_is_a_line_at_once(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        sink.write(step, {"step": step, "loss": -0.5, "kl_mean": None})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, step + 1))
    sink.close()


def test_what_json_cannot_say_is_null(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"step": 1, "ratio_max": float("inf"), "loss": float("nan"), "grad_norm": 1.0})
    sink.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record == {"step": 1, "ratio_max": None, "loss": None, "grad_norm": 1.0}


def test_a_full_disk_is_told_with_path_and_remedy(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    full = rf"{tmp_path}/metrics.jsonl cannot be written: No space left on device; free space there"
    with pytest.raises(RunError, match=full):
        sink.write(1, {"step": 1})
    sink.close()


def test_a_line_that_the_disk_has_no_room_for_is_not_there_in_part(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writes = (
        "import resource, signal, sys; from pathlib import Path; from coati_rl.observability.sinks import JsonlSink\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); sink = JsonlSink(Path(sys.argv[1]))\n"
        "sink.write(1, {'step': 1}); resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20)); sink.write(2, {'step': 2})\n"
    )
    ran = subprocess.run([sys.executable, "-c", writes, str(path)], capture_output=True, text=True)
    assert "metrics.jsonl cannot be written: File too large" in ran.stderr
    assert path.read_text() == '{"step": 1}\n'


def test_a_full_disk_under_tensorboard_is_told_and_no_thread_prints_a_traceback(tmp_path, monkeypatch, capsys):
    def limited(path, mode):
        return open("/dev/full", mode)

    monkeypatch.setattr(Path, "open", limited)
    with pytest.raises(RunError, match=rf"{tmp_path}/events.out.tfevents.* cannot be written: No space left on device"):
        TensorBoardSink(tmp_path)
    assert capsys.readouterr().err == ""


def test_tensorboard_gets_every_number_under_its_key_in_the_section_of_its_kind(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.write(1, {"step": 1, "loss": 0.5, "kl_mean": None})
    sink.write(2, {"step": 2, "loss": 0.25, "kl_mean": 0.125})
    sink.write(2, {"eval/math/accuracy": 0.75, "reward/brevity.score": -0.5, "reward/rm:8000/v1": 0.5})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    rewards = ["reward/brevity.score", "reward/rm:8000/v1"]
    assert sorted(events.Tags()["scalars"]) == ["eval/math/accuracy", *rewards, "train/kl_mean", "train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]
    assert [(event.step, event.value) for event in events.Scalars("train/kl_mean")] == [(2, 0.125)]


def test_tensorboard_forgets_the_steps_after_the_one_that_a_run_is_resumed_from(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first_step, steps, loss in ((0, (1, 2, 3), 0.5), (2, (3, 4), 0.25)):
        sink = TensorBoardSink(tmp_path, first_step=first_step)
        for step in steps:
            sink.write(step, {"loss": loss})
        sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    values = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert values == [(1, 0.5), (2, 0.5), (3, 0.25), (4, 0.25)]


def test_a_run_writes_jsonl_and_tensorboard_and_no_wandb_unless_asked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import of it would fail
    sinks = open_sinks(parse([])[0], tmp_path)
    assert [type(sink) for sink in sinks] == [JsonlSink, TensorBoardSink]
    for sink in sinks:
        sink.close()
    assert (tmp_path / "metrics.jsonl").is_file()
    assert any((tmp_path / "tensorboard").iterdir())


def test_wandb_without_its_package_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="--wandb: the package wandb is not installed"):
        WandbSink(parse(["--wandb"])[0], tmp_path)


def made(directory):
    directory.mkdir()
    return directory


ANSWER = SampledAnswer(
    step=10, prompt="1 + 1?", answer="2\n```\n# no heading\x1b[2J</script>", truth="2", reward=1.0, verdict="ok"
)


def test_tensorboard_shows_an_answer_as_a_block_of_code_in_which_nothing_is_markdown_or_moves_a_cursor(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.text.text_plugin import text_array_to_html
    from tensorboard.util import tensor_util

    sink = TensorBoardSink(tmp_path)
    sink.write_answer(10, ANSWER)
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.PluginTagToContent("text").keys() == {"rollouts/sampled_answer"}
    (event,) = events.Tensors("rollouts/sampled_answer")
    text = tensor_util.make_ndarray(event.tensor_proto)
    assert event.step == 10 and text.item().decode().splitlines() == [
        *("    step: 10", "    prompt: 1 + 1?", "    answer: 2", "    ```"),
        *("    # no heading\\x1b[2J</script>", "    ground truth: 2", "    reward: 1.0", "    verdict: ok"),
    ]
    shown = text_array_to_html(text, enable_markdown=True)
    assert shown.startswith("<pre><code>step: 10\n") and "# no heading\\x1b[2J&lt;/script&gt;" in shown


class FakeWandb:
    """Stand in for the functions of the package that are used."""

    def __init__(self):
        self.errors = SimpleNamespace(Error=RuntimeError)
        self.logged = []

    def init(self, **options):
        if options["project"] == "nobody":
            raise self.errors.Error("No API key configured.")
        self.options = options
        return self

    def define_metric(self, name, *, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, record):
        self.logged.append(record)

    def finish(self, *, exit_code):
        self.logged.append("failed" if exit_code else "finished")

    def Table(self, *, columns, data):
        return {"columns": columns, "data": data}


def test_wandb_gets_the_configuration_and_every_number_of_a_record(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sink = WandbSink(parse(["--wandb", "-p", "mine", "-t", "4"])[0], made(tmp_path / "mine-2"))
    sink.write(1, {"step": 1, "loss": 0.5, "kl_mean": None})
    sink.write(0, {"eval/math/accuracy": 0.75})  # a round that ended late: its step lies behind
    sink.close()
    assert (wandb.options["project"], wandb.options["name"]) == ("mine", "mine-2")
    assert wandb.options["config"]["num_trainers"] == 4
    assert wandb.options["resume"] == "allow"
    assert wandb.logged == [{"step": 1, "loss": 0.5}, {"step": 0, "eval/math/accuracy": 0.75}, "finished"]


def test_wandb_shows_a_run_that_did_not_come_to_its_end_as_failed(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    WandbSink(parse(["--wandb"])[0], tmp_path).close(has_failed=True)
    assert wandb.logged == ["failed"]


def test_wandb_goes_on_with_a_run_that_is_resumed_in_its_directory_and_shows_answers_as_tables(tmp_path, monkeypatch):
    ids = []
    for name in ("mine", "mine", "other"):
        wandb = FakeWandb()
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        (tmp_path / name).mkdir(exist_ok=True)
        sink = WandbSink(parse(["--wandb"])[0], tmp_path / name)
        sink.write_answer(10, ANSWER)
        ids.append(wandb.options["id"])
    assert ids[0] == ids[1] != ids[2]
    table = wandb.logged[0]["sampled_answer"]
    assert table["columns"] == ["step", "prompt", "answer", "ground truth", "reward", "verdict"]
    assert table["data"] == [[10, "1 + 1?", "2\n```\n# no heading\\x1b[2J</script>", "2", 1.0, "ok"]]


def test_wandb_without_an_account_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    with pytest.raises(ConfigError, match=r"--wandb: No API key configured\. \(WANDB_MODE=offline needs no account\)"):
        WandbSink(parse(["--wandb", "-p", "nobody"])[0], tmp_path)


@pytest.mark.full
def test_wandb_offline_writes_below_the_run_directory_under_the_id_that_is_kept_there(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "wandb-id.txt").write_text("a1b2c3d4\n")  # of the run that is resumed
    sink = WandbSink(parse(["--wandb"])[0], tmp_path)
    sink.write(1, {"step": 1, "loss": 0.5})
    sink.write_answer(1, ANSWER)
    sink.close()
    assert [path.name for path in tmp_path.glob("wandb/offline-run-*/*.wandb")] == ["run-a1b2c3d4.wandb"]
