"""Test that fields of Ray, processes and devices reach the call that they affect.

The part of a test's name before two underscores is the field (see test_flags.py).
"""

import os
import signal
import socket
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from ray.exceptions import AuthenticationError

import producer.actor
from coati_rl.config.cli import build_config
from coati_rl.config.plan import resolve_precision
from coati_rl.coordinator.settings import coordinator_settings
from coati_rl.driver import launch
from coati_rl.errors import ConfigError, RunError
from coati_rl.observability.phases import Phase
from coati_rl.processes.actor_classes import ActorClasses
from coati_rl.processes.actor_process import ActorContext
from coati_rl.processes.exit_messages import read_note
from coati_rl.processes.hangs import HangTimeouts
from coati_rl.processes.interrupts import ending_signals
from coati_rl.processes.run_dir import make_run_dir
from coati_rl.runtime import actor_group, address, cluster
from coati_rl.transport.wire import WeightSender
from consumer.parallel.store_location import StoreLocation
from consumer.weight_sync.publisher import WeightPublisher
from producer.actor import ProducerActor

CLASSES = ActorClasses(coordinator=object, trainer=object)
FOUR_TRAINERS = {"num_trainers": 4, "train_batch_size": 1, "train_minibatch_size": 1, "train_microbatch_size": 2}


def test_master_address__joins_a_cluster_instead_of_starting_one(ray_calls, start_ray, config_with):
    joined = config_with(master_address="10.0.0.1")
    for config in (config_with(), joined, config_with(master_address="10.0.0.1:7000")):
        start_ray(config)
    assert address.own_address(joined) == "10.0.0.9", "each actor is reached at its own node's address"
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


@pytest.mark.parametrize("port", [0, 31000])
def test_master_port__is_where_the_trainers_meet(monkeypatch, config_with, port):
    calls, rendezvous = [], StoreLocation(address="127.0.0.1", port=31000)

    def remote(name):
        return SimpleNamespace(remote=lambda *args: calls.append((name, *args)) or rendezvous)

    handle = SimpleNamespace(open_rendezvous=remote("open"), start=remote("start"), run=remote("run"))
    members = actor_group.ActorGroup.__new__(actor_group.ActorGroup)
    vars(members).update(
        _config=config_with(num_trainers=1, master_port=port),
        _classes=ActorClasses(coordinator=object, trainer=object),
        _namespace="run",
        _placement=SimpleNamespace(reward_models=[]),
        _coordinator=SimpleNamespace(client_of_actors=lambda: None),
        trainers={},
    )
    monkeypatch.setattr(actor_group.ActorGroup, "add_producer", lambda self: calls.append("producer"))
    monkeypatch.setattr(actor_group.ActorGroup, "_make_trainer", lambda self, rank: handle)
    monkeypatch.setattr(actor_group.remote, "wait_for", lambda reference, **_: calls.append("wait") or reference)
    members.start()
    wait = ["wait"] if port else []  # a port that is taken is found before engines are loaded
    begin = [("open",), *wait, "producer", "wait", ("start", rendezvous)]
    assert calls[: len(begin)] == begin


def test_master_port__that_is_taken_is_found_before_anything_is_made_or_moved(prepare_with, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        prepared = prepare_with(master_port=port)
        with pytest.raises(ConfigError, match=f"--master_port {port}: .* already in use; use --master_port 0"):
            launch.launch(prepared, CLASSES, scratch=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_device__overrides_what_the_machine_has(monkeypatch, prepare_with):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=80 * 2**30))
    assert [prepare_with(device=device).plan.device for device in ("auto", "cpu")] == ["cuda", "cpu"]


def test_num_trainers__shares_an_optimizer_step_among_more_of_them(prepare_with):
    one, two = (prepare_with(num_trainers=number).plan for number in (1, 2))
    assert [plan.config.dp for plan in (one, two)] == [1, 2]
    assert [plan.config.prompts_per_step for plan in (one, two)] == [2, 4]
    assert [plan.num_devices for plan in (one, two)] == [2, 3]


@pytest.mark.parametrize("width", [1, 2])
def test_producer_tensor_parallel_size__widens_engine_devices_and_weight_group(
    monkeypatch, config_with, start_without_vllm, tmp_path, width
):
    config = config_with(backend="vllm", producer_tensor_parallel_size=width)
    seen = []
    monkeypatch.setattr(producer.actor, "enter_actor", lambda context: None)
    monkeypatch.setattr("producer.engines.create_engine", lambda backend, options, **others: seen.append(options))
    context = ActorContext(name="producer-0", log_dir=tmp_path, device="cpu", dtype="float32", slot=0, num_slots=1)
    start_without_vllm(ProducerActor(0, config, context, make_reward=lambda: None))
    assert [options.tensor_parallel_size for options in seen] == [width]
    assert config.num_devices == width + 1
    # The group of a weight sync by shared memory: the trainer and every rank of every engine.
    sender = WeightSender(backend="shm")
    publisher = WeightPublisher(sender, None, None, None, ranks_per_producer=width, timeout_s=1.0, commit_timeout_s=1.0)
    assert {invitation.world_size for invitation in sender.open([publisher._ranks_per_producer] * 2)} == {1 + 2 * width}
    sender.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_parallel_size__cuts_each_model_over_so_many_trainers(backend_of, config_with, tp):
    config = config_with(**FOUR_TRAINERS, tensor_parallel_size=tp)
    assert backend_of(config).tp_size == tp
    settings = coordinator_settings(config)
    assert (settings.batch.dp, settings.trainers_per_dp_rank) == (4 // tp, tp)


@pytest.mark.parametrize("pp", [1, 2])
def test_pipeline_parallel_size__makes_so_many_stages(backend_of, config_with, pp):
    config = config_with(**FOUR_TRAINERS, pipeline_parallel_size=pp)
    assert backend_of(config).pp_size == pp
    settings = coordinator_settings(config)
    assert (settings.batch.dp, settings.trainers_per_dp_rank) == (4 // pp, pp)


@pytest.mark.parametrize("cp", [1, 2])
def test_context_parallel_size__lets_so_many_trainers_share_each_row(backend_of, config_with, cp):
    config = config_with(**FOUR_TRAINERS, context_parallel_size=cp)
    assert backend_of(config).cp_size == cp
    settings = coordinator_settings(config)
    assert (settings.batch.dp, settings.trainers_per_dp_rank) == (4 // cp, cp)
    assert config.num_copies == 4


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_zero_stage__reaches_the_training_engine_and_chooses_bf16(backend_of, config_with, stage):
    config = config_with(zero_stage=stage)
    assert backend_of(config).zero_stage == stage
    assert resolve_precision(config, "cpu") == ("bf16" if stage else "fp32")


@pytest.mark.parametrize("plugin", ["hybrid", "fsdp2"])
def test_plugin__chooses_how_trainers_share_a_model_out(backend_of, config_with, plugin):
    config = config_with(**FOUR_TRAINERS, plugin=plugin)
    assert backend_of(config).plugin == plugin
    assert coordinator_settings(config).batch.dp == 4


@pytest.mark.parametrize(("size", "ranks"), [(0, 4), (2, 2)])
def test_fsdp_size__lets_so_many_trainers_share_a_copy_of_the_weights(backend_of, config_with, size, ranks):
    config = config_with(**FOUR_TRAINERS, plugin="fsdp2", fsdp_size=size)
    assert backend_of(config).fsdp_size == size
    assert (config.fsdp_ranks, coordinator_settings(config).batch.dp) == (ranks, 4)


@pytest.mark.parametrize("ep", [1, 2])
def test_expert_parallel_size__lets_so_many_trainers_share_experts_out(backend_of, config_with, ep):
    config = config_with(**FOUR_TRAINERS, plugin="fsdp2", expert_parallel_size=ep)
    assert backend_of(config).ep_size == ep
    assert coordinator_settings(config).batch.dp == 4


@pytest.mark.parametrize("is_on", [False, True])
def test_gradient_checkpointing__reaches_the_training_engine(backend_of, config_with, is_on):
    assert backend_of(config_with(gradient_checkpointing=is_on)).gradient_checkpointing is is_on


def test_offload_activations__reaches_the_training_engine_and_recomputes(backend_of, config_with):
    backend = backend_of(config_with(offload_activations=True))
    assert backend.offload_activations and backend.gradient_checkpointing
    assert not backend_of(config_with()).offload_activations


@pytest.mark.parametrize("is_on", [None, False, True])
def test_compile_ops__reaches_the_training_engine(backend_of, config_with, is_on):
    assert backend_of(config_with(compile_ops=is_on)).compile_ops is is_on


def test_project__names_the_run_directory(monkeypatch, small_run, tmp_path):
    monkeypatch.chdir(tmp_path)
    paths = [make_run_dir(build_config(small_run | {"project": project})).run_dir for project in ("GRPO", "mine")]
    assert paths == [tmp_path / "runs/GRPO", tmp_path / "runs/mine"]


@pytest.fixture
def launch_interrupted(monkeypatch, prepare_with, tmp_path):
    """Fields -> what the driver does after Ctrl-C, and the note that it leaves for the subreaper."""

    def run(**fields):
        deadlines = []

        class Interrupted:
            def __init__(self, *_, **__): ...

            def run(self, interrupted_at):
                os.kill(os.getpid(), signal.SIGINT)
                self.at = interrupted_at()

            def flush_records(self):
                """There are none."""

            def save(self, *, deadline):
                deadlines.append(round(deadline - self.at, 3))
                raise RunError("trainer-0 died")

        actors = SimpleNamespace(start=lambda on_status: None, end=lambda: None)
        monkeypatch.setattr(actor_group, "in_ray", lambda *_, **__: nullcontext(lambda: actors))
        monkeypatch.setattr(launch, "Supervisor", Interrupted)
        with pytest.raises(KeyboardInterrupt) as interrupt:
            launch.launch(prepare_with(**fields), CLASSES, scratch=tmp_path)
        reason = "no checkpoint of the last step: trainer-0 died"
        assert str(interrupt.value) == (reason if deadlines else "")
        return deadlines, read_note(tmp_path)

    before = {number: signal.getsignal(number) for number in ending_signals()}
    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def test_save_on_interrupt__is_done_within_the_grace_period(launch_interrupted):
    assert launch_interrupted()[0] == [10.0], "5 s of 15 are left to end everything"
    assert launch_interrupted(save_on_interrupt=False)[0] == []


def test_interrupt_grace_s__is_what_the_driver_and_its_parent_process_allow(launch_interrupted, tmp_path):
    deadlines, note = launch_interrupted(interrupt_grace_s=8.0)
    assert (deadlines, note.grace_s) == ([4.0], 8.0)
    deadlines, note = launch_interrupted(interrupt_grace_s=600.0)
    assert (deadlines, note.grace_s) == ([595.0], 600.0)
    assert note.how_to_resume() == "; no checkpoint was written: start it again"


@pytest.mark.parametrize("seconds", [1800.0, 5.0])
def test_stall_timeout_s__is_the_supervisors_patience(monkeypatch, prepare_with, tmp_path, seconds):
    seen = {}

    class Ended(Exception):
        pass

    def supervisor(actor_group, on_event, **options):
        seen.update(options)
        raise Ended

    monkeypatch.setattr(actor_group, "in_ray", lambda *_, **__: nullcontext(lambda: None))
    monkeypatch.setattr(launch, "Supervisor", supervisor)
    with pytest.raises(Ended):
        launch.launch(prepare_with(stall_timeout_s=seconds), CLASSES, scratch=tmp_path)
    assert seen["stall_timeout_s"] == seconds


@pytest.mark.full
def test_max_failure_rate__decides_how_many_failures_end_the_run(run_in_threads, tokenizer):
    refused = tuple(tokenizer("u:trainx\na:", add_special_tokens=False)["input_ids"])
    assert run_in_threads({"max_failure_rate": 0.5}, fails={refused}).of("finished"), "2 of 4 samples may fail"
    # Of the 14 other samples any number may have come in by then: 14 % of 4 are 0, of 14 they are 1.
    with pytest.raises(RunError, match=r"2 samples of one step failed or could not be scored, [01] are allowed"):
        run_in_threads({"max_failure_rate": 0.14}, fails={refused})


@pytest.mark.parametrize("seconds", [30.0, 5.0])
def test_heartbeat_timeout_s__is_how_long_an_actor_may_be_silent(config_with, seconds):
    assert HangTimeouts.of(config_with(heartbeat_timeout_s=seconds)).heartbeat_s == seconds


@pytest.mark.parametrize("seconds", [60.0, 5.0])
def test_phase_timeout_s__is_the_least_that_a_phase_may_take(config_with, seconds):
    timeouts = HangTimeouts.of(config_with(phase_timeout_s=seconds, sync_timeout_s=50.0), checkpoint_bytes=10**12)
    phases = [Phase(name=n, path=n, item=1, seconds=0.0, median_s=0.1) for n in ("train", "sync", "save")]
    assert [timeouts.limit_s(phase) for phase in phases] == [seconds, seconds + 50.0, seconds + 2000.0]
