"""Fields that act on Ray, on processes and on devices: the value reaches the call that acts on it.

The part of a test's name before two underscores is the field (see test_flags.py).
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from ray.exceptions import AuthenticationError

import consumer.actor
import producer.actor
from coati_rl.config.cli import build_config
from coati_rl.config.plan import resolve_precision
from coati_rl.config.rules import check
from coati_rl.data.prepare import prepare
from coati_rl.data.settings import coordinator_settings
from coati_rl.errors import ConfigError, RunError
from coati_rl.observability.sinks import open_sinks
from coati_rl.runtime import cluster, crew, launch
from coati_rl.runtime.process import Place
from coati_rl.runtime.run_dir import make_run_dir
from coati_rl.transport.wire import WeightSender
from consumer.weight_publisher import WeightPublisher
from producer.actor import ProducerActor

FOUR_TRAINERS = {"num_trainers": 4, "train_batch_size": 1, "train_minibatch_size": 1, "train_microbatch_size": 2}


@pytest.fixture
def config_with(small_run, tmp_path):
    def make(**changes):
        config = build_config({**small_run, "run_dir": str(tmp_path / "run"), **changes})
        check(config)
        return config

    return make


@pytest.fixture
def backend_of(monkeypatch, tmp_path):
    """What a trainer builds its engine from."""

    def make(config):
        seen = []
        monkeypatch.setattr(consumer.actor, "enter_actor", lambda place: None)
        monkeypatch.setattr(consumer.actor, "init_process_group", lambda **options: torch.device("cpu"))
        monkeypatch.setattr(
            "consumer.colossal_backend.ColossalBackend", lambda settings, **options: seen.append(settings)
        )
        place = Place(name="trainer-0", log_dir=tmp_path, device="cpu", dtype="float32", slot=0, num_slots=1)
        trainer = consumer.actor.TrainerActor(0, config, place, run_dir=tmp_path, checkpoint_dir=tmp_path)
        trainer.start("127.0.0.1", 0)
        return seen[0]

    return make


@pytest.fixture
def prepare_with(config_with):
    return lambda **changes: prepare(config_with(**changes), system_prompt="", needs_truth=False, is_dry_run=False)


@pytest.fixture
def ray_calls(monkeypatch):
    """What `ray.init` is called with."""
    calls = []
    monkeypatch.setattr(cluster.ray, "init", lambda **options: calls.append(options))
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster.ray.util, "get_node_ip_address", lambda: "10.0.0.9")
    return calls


def test_ray_dir__is_where_ray_puts_its_sockets_and_logs(ray_calls, config_with, tmp_path):
    sizes = {"num_cpus": 2, "num_gpus": 0, "scratch": tmp_path / "scratch"}
    with cluster.ray_cluster(config_with(ray_dir=str(tmp_path / "ray")), **sizes):
        assert cluster.own_address(config_with()) == "127.0.0.1"
    with cluster.ray_cluster(config_with(), **sizes):
        pass
    assert [call["_temp_dir"] for call in ray_calls] == [str(tmp_path / "ray"), str(tmp_path / "scratch")]


def test_master_address__joins_a_cluster_instead_of_starting_one(ray_calls, config_with, tmp_path):
    sizes = {"num_cpus": 2, "num_gpus": 2, "scratch": tmp_path}
    with cluster.ray_cluster(config_with(), **sizes):
        pass
    joined = config_with(master_address="10.0.0.1")
    with cluster.ray_cluster(joined, **sizes):
        assert cluster.own_address(joined) == "10.0.0.9", "each actor is reached at its own node's address"
    with cluster.ray_cluster(config_with(master_address="10.0.0.1:7000"), **sizes):
        pass
    assert [call["address"] for call in ray_calls] == ["local", "10.0.0.1:6379", "10.0.0.1:7000"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("no"), "10.0.0.1:6379: no Ray cluster answers, or this machine is not one of its nodes"),
        (AuthenticationError("no"), "10.0.0.1:6379: the Ray cluster refuses this machine's token"),
    ],
)
def test_master_address__that_cannot_be_joined_is_refused(monkeypatch, config_with, tmp_path, error, message):
    def init(**options):
        raise error

    monkeypatch.setattr(cluster.ray, "init", init)
    config = config_with(master_address="10.0.0.1")
    with (
        pytest.raises(ConfigError, match=message),
        cluster.ray_cluster(config, num_cpus=2, num_gpus=0, scratch=tmp_path),
    ):
        pass


@pytest.mark.parametrize("port", [29506, 31000])
def test_master_port__is_where_the_trainers_meet(monkeypatch, config_with, port):
    calls = []

    def remote(name):
        return SimpleNamespace(remote=lambda *args: calls.append((name, *args)) or ("127.0.0.1", port))

    handle = SimpleNamespace(open_listener=remote("open_listener"), start=remote("start"), run=remote("run"))
    members = crew.Crew.__new__(crew.Crew)
    vars(members).update(_config=config_with(master_port=port), _namespace="run", coordinator=None, trainers={})
    monkeypatch.setattr(crew.Crew, "add_producer", lambda self: 0)
    monkeypatch.setattr(crew.Crew, "_make_trainer", lambda self, rank: handle)
    monkeypatch.setattr(crew, "wait_for", lambda reference, **_: reference)
    members.start()
    assert calls[:2] == [("open_listener", port), ("start", "127.0.0.1", port)]


def test_device__overrides_what_the_machine_has(monkeypatch, prepare_with):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert [prepare_with(device=device).plan.device for device in ("auto", "cpu")] == ["cuda", "cpu"]


def test_num_trainers__shares_an_optimizer_step_among_more_of_them(prepare_with):
    one, two = (prepare_with(num_trainers=number).plan for number in (1, 2))
    assert [plan.dp for plan in (one, two)] == [1, 2]
    assert [plan.prompts_per_step for plan in (one, two)] == [2, 4]
    assert [plan.num_devices for plan in (one, two)] == [2, 3]


@pytest.mark.parametrize("width", [1, 2])
def test_producer_tensor_parallel_size__widens_engine_devices_and_weight_group(
    monkeypatch, config_with, tmp_path, width
):
    config = config_with(backend="vllm", producer_tensor_parallel_size=width)
    seen = {}
    monkeypatch.setattr(producer.actor, "enter_actor", lambda place: None)
    monkeypatch.setattr(producer.actor, "create_engine", lambda backend, **settings: seen.update(settings))
    place = Place(name="producer-0", log_dir=tmp_path, device="cpu", dtype="float32", slot=0, num_slots=1)
    ProducerActor(0, config, place, make_reward=lambda: None).start()
    assert seen["tensor_parallel_size"] == width
    assert config.num_devices == width + 1
    # The group of a weight sync: the trainer and every rank of every engine.
    sender = WeightSender()
    publisher = WeightPublisher(sender, None, None, None, ranks_per_producer=width, timeout_s=1.0, commit_timeout_s=1.0)
    assert {invitation.world_size for invitation in sender.open([publisher._ranks_per_producer] * 2)} == {1 + 2 * width}
    sender.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_parallel_size__cuts_each_model_over_so_many_trainers(backend_of, config_with, tp):
    config = config_with(**FOUR_TRAINERS, tensor_parallel_size=tp)
    assert backend_of(config).tp_size == tp
    settings = coordinator_settings(config)
    assert (settings.batch.dp, settings.ranks_per_dp_group) == (4 // tp, tp)


@pytest.mark.parametrize("pp", [1, 2])
def test_pipeline_parallel_size__makes_so_many_stages(backend_of, config_with, pp):
    config = config_with(**FOUR_TRAINERS, pipeline_parallel_size=pp)
    assert backend_of(config).pp_size == pp
    settings = coordinator_settings(config)
    assert (settings.batch.dp, settings.ranks_per_dp_group) == (4 // pp, pp)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_zero_stage__reaches_the_training_engine_and_chooses_bf16(backend_of, config_with, stage):
    config = config_with(zero_stage=stage)
    assert backend_of(config).zero_stage == stage
    assert resolve_precision(config, "cpu") == ("bf16" if stage else "fp32")


@pytest.mark.parametrize("is_on", [False, True])
def test_gradient_checkpointing__reaches_the_training_engine(backend_of, config_with, is_on):
    assert backend_of(config_with(gradient_checkpointing=is_on)).gradient_checkpointing is is_on


def test_project__names_the_run_directory(monkeypatch, small_run, tmp_path):
    monkeypatch.chdir(tmp_path)
    paths = [make_run_dir(build_config(small_run | {"project": project})).run_dir for project in ("GRPO", "mine")]
    assert paths == [tmp_path / "runs/GRPO", tmp_path / "runs/mine"]


def test_wandb__adds_a_sink(monkeypatch, config_with, tmp_path):
    monkeypatch.setattr("coati_rl.observability.sinks.WandbSink", lambda config, run_dir: "wandb")
    sinks = open_sinks(config_with(), tmp_path), open_sinks(config_with(wandb=True), tmp_path)
    assert [len(some) for some in sinks] == [2, 3]
    assert sinks[1][2] == "wandb"
    for sink in (*sinks[0], *sinks[1][:2]):
        sink.close()


@pytest.mark.parametrize("seconds", [1800.0, 5.0])
def test_stall_timeout_s__is_the_supervisors_patience(monkeypatch, prepare_with, tmp_path, seconds):
    seen = {}

    class Ended(Exception):
        pass

    def supervisor(crew, on_event, **options):
        seen.update(options)
        raise Ended

    monkeypatch.setattr(launch, "ray_cluster", lambda config, **_: nullcontext("127.0.0.1"))
    monkeypatch.setattr(launch, "Crew", lambda *_, **__: None)
    monkeypatch.setattr(launch, "Supervisor", supervisor)
    with pytest.raises(Ended):
        launch.launch(prepare_with(stall_timeout_s=seconds), object, object, lambda: None, scratch=tmp_path)
    assert seen["stall_timeout_s"] == seconds


def test_max_failure_rate__decides_how_many_failures_end_the_run(run_in_threads, tokenizer):
    refused = tuple(tokenizer("u:trainx\na:", add_special_tokens=False)["input_ids"])
    assert run_in_threads({"max_failure_rate": 0.5}, fails={refused}).of("finished"), "2 of 4 samples may fail"
    with pytest.raises(RunError, match="1 are allowed"):
        run_in_threads({"max_failure_rate": 0.49}, fails={refused})
