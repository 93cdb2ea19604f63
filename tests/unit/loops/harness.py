"""Execute a whole run in threads, without Ray: the real actors, called directly instead of through handles.

Real: configuration, preparation, coordinator, producer and trainer actors, fake engine, weight transfer over gloo.
Replaced: what a process does on entry (pinning, logs), ColossalAI by plain torch, the reward by an inline function.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

import consumer.actor
import producer.actor
from coati_rl.config.cli import build_config
from coati_rl.config.reward import reward_spec
from coati_rl.config.rules import check
from coati_rl.driver import coordinator_actors
from coati_rl.errors import RunError
from coati_rl.preflight.prepare import RunPreparation
from coati_rl.preflight.prepared_run import Prepared
from coati_rl.preflight.prompts import RewardFacts
from coati_rl.processes.actor_process import ActorContext
from coati_rl.processes.run_dir import RunPaths, make_run_dir
from coati_rl.types import Lease, Problem, RolloutGroup, Score
from coati_rl.work import Wait, Work
from consumer.backend import Backend
from consumer.parallel.layout_rules import check_layout
from consumer.parallel.single_process import SingleProcess
from consumer.parallel.store_location import StoreLocation
from consumer.proofs.model import try_model
from producer.engines import create_engine
from producer.made_environment import check_environment
from rewards import default_system_prompt, make_reward
from rewards.registry import needs_ground_truth
from tests.unit.loops.watched_engine import InlineReward, WatchedEngine

RUN_TIMEOUT_S = 60.0


def parity_reward(response: str, ground_truth: str) -> Score:
    """1 for responses of odd length: about half of what the fake engine writes."""
    is_odd = len(response) % 2 == 1
    return Score(reward=float(is_odd), answer_correct=is_odd, format_valid=True, verdict="ok" if is_odd else "wrong")


@dataclass
class Trace:
    """Record the events of a run."""

    prepared: Prepared
    paths: RunPaths
    events: list[dict] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    groups: list[RolloutGroup] = field(default_factory=list)  # as accepted, training and evaluation
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)  # by step, scaled and clipped
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # at the end, by name
    engines: list["WatchedEngine"] = field(default_factory=list)

    def of(self, kind: str) -> list[dict]:
        """Events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def steps(self) -> list[dict]:
        """The record of each optimizer step."""
        return self.of("step")

    @property
    def responses(self) -> dict[str, list[list[int]]]:
        """Prompt -> the token ids of each sample."""
        return {g.prompt.uid: [t.token_ids[t.loss_mask].tolist() for t in g.trajectories] for g in self.groups}


class ThreadedRun:
    """One run; `run` returns its trace or raises what ended it."""

    def __init__(
        self,
        values,
        *,
        score=parity_reward,
        hold_trainer=False,
        replace=True,
        dies_at_request=None,
        display=None,
        **engine,
    ):
        """`hold_trainer`: until time decides nothing, see `_recording`; `dies_at_request`: of producer 0; `engine`:
        faults of all.
        """
        config = build_config(values)
        check(config)
        facts = RewardFacts(default_system_prompt=default_system_prompt, needs_ground_truth=needs_ground_truth)
        prepared = RunPreparation(
            rewards=facts,
            check_layout=check_layout,
            try_model=try_model,
            is_dry_run=False,
            environment=check_environment(config),
        ).prepare(config)
        self.trace = Trace(prepared=prepared, paths=make_run_dir(config, prepared.resume))
        self._config = prepared.config
        self._score = score or {name: score_of(settings) for name, settings in config.by_task.items()}
        self._hold_trainer = hold_trainer
        self._replace = replace
        self._dies_at_request = dies_at_request
        self._engine_faults = engine
        self._display = display
        self._producers = {}
        self._threads = []
        self._errors = []
        self._is_over = False

    def run(self) -> Trace:
        with pytest.MonkeyPatch.context() as patch:
            for module in (coordinator_actors, consumer.actor, producer.actor):
                patch.setattr(module, "enter_actor", lambda context: None)
            patch.setattr("producer.engines.create_engine", self._create_engine)
            patch.setattr("consumer.backend.make_backend", lambda config, **options: self._make_backend(config))
            patch.setattr("consumer.parallel.process_group.init_process_group", lambda **options: torch.device("cpu"))
            patch.setattr("coati_rl.runtime.remote.RemoteProducer", self._connect)
            self._coordinator = _recording(
                coordinator_actors.CoordinatorActor, self.trace, hold_trainer=self._hold_trainer
            )(self.trace.prepared, self.trace.paths, self._context("coordinator"))
            try:
                for _ in range(self._config.parallel.num_inferencer):
                    self._add_producer()
                trainer = self._start(self._train)
                self._watch(trainer)
            finally:
                self._end()
            self._coordinator.flush(timeout_s=10)
        assert self.trace.weights, "the trainer ended without a word"
        return self.trace

    def _end(self):
        """End what goes on, before the replaced parts become the real ones again."""
        self._is_over = True
        for actor in list(self._producers.values()):
            actor.close()
        for thread in self._threads:
            thread.join(timeout=60.0)
        assert not any(thread.is_alive() for thread in self._threads), "a loop goes on after the end of the run"

    def _watch(self, trainer):
        """Be the driver: take events until the trainer is done."""
        deadline, seen, is_over = time.monotonic() + RUN_TIMEOUT_S, 0, False
        while not is_over:
            is_over = not trainer.is_alive()
            events = self._coordinator.events(seen, timeout_s=0.0 if is_over else 0.05)
            seen += len(events)
            self.trace.events += events
            if self._display is not None:
                self._show(events)
            if self._errors:
                raise self._errors[0]
            assert time.monotonic() < deadline, f"the run hangs after {self.trace.events[-5:]}"

    def _show(self, events):
        for event in events:
            self._display.show(event)
        self._display.show_wait(self._coordinator.status().text)

    def _start(self, target: Callable[..., None], *args) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _train(self):
        resume = self.trace.prepared.resume
        try:
            trainer = consumer.actor.TrainerActor(
                0,
                self._config,
                self._context("trainer-0"),
                run_dir=self.trace.paths.run_dir,
                checkpoint_dir=self.trace.paths.checkpoints,
                resume_dir=resume.directory if resume else None,
            )
            trainer.start(StoreLocation(address="127.0.0.1"))
            trainer.run(self._coordinator, "namespace")
            self.trace.weights = {name: weight.clone() for name, weight in self._backend.export_weights()}
        except RunError as error:
            self._errors.append(error)

    def _add_producer(self):
        producer_id = len(self._producers)
        actor = producer.actor.ProducerActor(
            producer_id, self._config, self._context(f"producer-{producer_id}"), lambda: InlineReward(self._score)
        )
        self._producers[producer_id] = actor
        actor.start()
        self._coordinator.add_producer(producer_id)
        self._start(self._produce, producer_id, actor)

    def _produce(self, producer_id, actor):
        try:
            actor.run(self._coordinator)
        except RunError as error:
            self._coordinator.remove_producer(producer_id, str(error))
            if self._replace and not self._is_over:
                self._add_producer()

    def _create_engine(self, backend, options, **others):
        engine = WatchedEngine(
            create_engine(backend, options, **others),
            {"backend": backend, **dataclasses.asdict(options), **others},
            dies_at_request=None if self.trace.engines else self._dies_at_request,
            **self._engine_faults,
        )
        self.trace.engines.append(engine)
        return engine

    def _make_backend(self, config):
        backend = self._backend = Backend(config, SingleProcess(device=torch.device("cpu")))

        def note_gradients(*_):  # after the hook that scales and clips
            self.trace.gradients.append({n: p.grad.clone() for n, p in backend.policy.parameters.trained.items()})

        backend.policy.torch_optimizer.register_step_pre_hook(note_gradients)
        return backend

    def _connect(self, name, namespace):
        return _LocalProducer(self._producers[int(name.removeprefix("producer-"))])

    def _context(self, name):
        plan = self.trace.prepared.plan
        dtype = "bfloat16" if plan.precision == "bf16" else "float32"
        return ActorContext(name=name, log_dir=self.trace.paths.logs, device="cpu", dtype=dtype, slot=0, num_slots=1)


def score_of(settings):
    """What scores a response with the reward of a task's settings, in this process."""
    reward = make_reward(reward_spec(settings.reward))
    return lambda response, ground_truth: next(iter(reward.score([response], Problem(ground_truth=ground_truth))))


class _LocalProducer:
    """Do what RemoteProducer does, without the actor handle."""

    def __init__(self, actor):
        self._actor = actor

    def stage_weights(self, manifest, rendezvous, *, timeout_s):
        return self._actor.stage_weights(manifest.to_json(), rendezvous.to_json(), timeout_s)

    def sleep(self, *, timeout_s):
        return self._actor.sleep(timeout_s)

    def commit_weights(self, policy_version, probe, *, timeout_s):
        return self._actor.commit_weights(policy_version, tuple(probe), timeout_s)


def _recording(coordinator_cls, trace, *, hold_trainer):
    """The coordinator's class, with what passes through it noted in the trace.

    With `hold_trainer` the trainer waits until producers have leased every free slot and delivered what a step could
    train: neither the weights that sample a prompt nor the groups of a step depend on how long anything takes.
    """

    class Recorded(coordinator_cls):
        def next_work(self, index, *, rank, timeout_s):
            if hold_trainer and index > 0 and self._may_depend_on_time():  # item 0 brings the producer its weights
                time.sleep(0.001)
                return Wait(reason="the test holds the trainer")
            work = super().next_work(index, rank=rank, timeout_s=timeout_s)
            if not isinstance(work, Wait):
                trace.work.append(work)
            return work

        def _may_depend_on_time(self):
            with self._changed:
                if self._state.problem:  # the trainer's next call raises it, and no prompt is leased any more
                    return False
                flow, last_sync = self._state.flow, self._state.members.sync_index
                # A checkpoint at each sync waits for older prompts itself; the others are trained after the next sync.
                waits_itself = self._state.settings.save_interval == 1 and flow.step > 0
                return flow.refusal() is None or flow.num_leased_before(last_sync + (not waits_itself)) > 0

        def lease(self, producer_id, **options):
            reply = super().lease(producer_id, **options)
            trace.leases.extend(reply.leases)
            return reply

        def put(self, producer_id, groups):
            accepted = super().put(producer_id, groups)
            assert accepted in (0, len(groups))
            leases = {lease.lease_id: lease for lease in trace.leases}
            for packed in groups if accepted else []:
                lease = leases[packed.lease_id]
                trace.groups.append(packed.unpack(lease.prompt, temperature=lease.sampling.temperature))
            return accepted

    return Recorded
