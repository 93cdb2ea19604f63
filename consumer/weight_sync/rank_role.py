"""Choose what a trainer rank does in a weight sync, by its layout.

Rank 0 directs the sync; the head rank of every other pipeline stage sends that stage's weights; the other
tensor-parallel ranks take part in gathering them; ranks with dp_rank > 0 send nothing. All ranks first score the sync's
probe with the weights that are sent; the engines' log-probabilities are compared with these. Where routes are replayed
they score it after an engine's answer, which has its routes, and before the next update.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from coati_rl.batching.packing import probe_micro_batch
from coati_rl.config import Config
from coati_rl.config.server_rules import stages_on_host
from coati_rl.config.update_rules import stages_on_gpu
from coati_rl.protocols import SyncReports, WeightReceiver
from coati_rl.transport.choice import WeightTransport, choose_backend
from coati_rl.transport.wire import WeightSender
from coati_rl.work import ProbeReport, ProbeWork, SyncWork
from consumer.train_loop import Publish, ScoreProbe
from consumer.weight_sync.publisher import StageSender, WeightPublisher, Weights
from consumer.weight_sync.rank_sender import Exporter, make_manifest

if TYPE_CHECKING:
    from consumer.backend import Backend

PROBES_PER_REFERENCE = 8  # of which the first is scored in float32, too

Send = Callable[[SyncWork, Weights], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """Hold what a rank does in a weight sync."""

    publish: Publish
    score_probe: ScoreProbe  # with an engine's routes, once it has answered
    start_commits: Callable[[], None]  # where they wait for the producers' turn
    release: Callable[[], None]  # of the memory of transfers, until the next one


@contextmanager
def publishing(
    backend: "Backend",
    config: Config,
    connect: Callable[[int], WeightReceiver],
    reports: SyncReports,
    *,
    host: str,
    directory: Path,
) -> Iterator[Publication]:
    """Yield what runs a sync on this rank; the transfer group is closed at the end.

    Args:
        backend: holds the weights.
        config: of the run.
        connect: returns the remote end of a producer id.
        reports: the coordinator.
        host: this process's address, as producers and other trainers reach it.
        directory: for weights that are sent as files.
    """
    sender = make_sender(
        backend,
        config.sync.weight_transport,
        gpu_memory_utilization=config.parallel.gpu_memory_utilization,
        host=host,
        is_one_node=not config.cluster.master_address,
        directory=directory,
        in_turns=stages_on_host(config),
        sends_deltas=config.sync.sync_deltas,
    )
    with closing(sender):
        send, start_commits = _make_send(backend, config, connect, reports, sender)
        is_rounded, numbers = config.sync.judges_rounding and backend.precision == "bf16", count()

        def score_probe(work: SyncWork | ProbeWork) -> None:
            in_float32 = is_rounded and next(numbers) % PROBES_PER_REFERENCE == 0
            _score_probe(backend, work, reports, in_float32=in_float32)

        def publish(work: SyncWork) -> None:
            if work.probe and config.router_replay != "rollout":
                score_probe(work)
            # Collective: with sharded weights other ranks take part in the export; one of each stage sends.
            send(work, backend.export_weights())

        yield Publication(publish=publish, score_probe=score_probe, start_commits=start_commits, release=sender.close)


def make_sender(
    backend: Exporter,
    transport: WeightTransport,
    *,
    gpu_memory_utilization: float,
    host: str,
    is_one_node: bool,
    directory: Path | None,
    shares_process: bool = False,
    in_turns: bool = False,
    sends_deltas: bool = False,
) -> WeightSender:
    """Return this rank's end of weight transfers.

    Args:
        backend: exports the weights.
        transport: `--weight-transport`.
        gpu_memory_utilization: the share of a GPU that engines take.
        host: this process's address, as engines and other trainers reach it.
        is_one_node: True if all of them are on this machine.
        directory: for weights that are sent as files; None: they are not.
        shares_process: an engine is in this process.
        in_turns: engines share the trainers' GPUs in turns.
        sends_deltas: of files: see `WeightSender`.
    Raises: ConfigError if the transport cannot work here.
    """
    device = backend.device
    update_bytes = sum(entry.num_bytes for entry in backend.weight_entries())
    wire = choose_backend(
        transport,
        device="cuda" if device.type == "cuda" else "cpu",
        is_one_node=is_one_node,
        update_bytes=update_bytes,
        shares_process=shares_process,
        in_turns=in_turns,
    )
    on_gpu = stages_on_gpu(
        update_bytes,
        gpu_bytes=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    return WeightSender(
        backend=wire,
        host=host,
        device=device,
        directory=directory,
        stages_on_gpu=on_gpu,
        sends_deltas=sends_deltas and wire == "file",
    )


def _make_send(
    backend: "Backend",
    config: Config,
    connect: Callable[[int], WeightReceiver],
    reports: SyncReports,
    sender: WeightSender,
) -> tuple[Send, Callable[[], None]]:
    """Return what sends this rank's weights, and what starts the commits that wait for the producers' turn."""
    number = backend.layout.sender
    if number is None:
        return lambda work, weights: _exhaust(weights), _nothing
    if number > 0:
        stage_sender = StageSender(sender, lambda: backend.broadcast_text(None), rank=number)
        return lambda work, weights: stage_sender.send(weights), _nothing
    publisher = WeightPublisher(
        sender,
        connect,
        lambda version: make_manifest(backend, version),
        reports,
        ranks_per_producer=config.parallel.producer_tensor_parallel_size,
        timeout_s=config.sync.sync_timeout_s,
        # Below the stall timeout, so that a producer that hangs is replaced before the run counts as stalled.
        commit_timeout_s=config.sync.sync_timeout_s
        if config.sync.commits_in_flight
        else 0.9 * config.cluster.stall_timeout_s,
        num_senders=backend.layout.num_senders,
        announce=lambda text: _announce(backend, text),
        commits_at_once=not config.takes_turns,
    )
    return publisher.publish, publisher.start_commits


def _nothing() -> None:
    """Start no commit: another rank directs the sync."""


def _score_probe(backend: "Backend", work: SyncWork | ProbeWork, reports: SyncReports, *, in_float32: bool) -> None:
    """Score the probe on all ranks and report its log-probabilities from the rank that has them.

    With `in_float32` it is scored a second time: what bfloat16 rounds of it.
    """
    routes, producer = (work.routes, work.producer) if isinstance(work, ProbeWork) else (None, None)
    probe = probe_micro_batch(work.probe, routes)
    scores = backend.score([probe])
    references = backend.score_float32([probe]) if in_float32 else []
    if backend.layout.is_reporter:
        logprobs, *reference = (each[0][0].float().cpu().numpy() for each in (scores, references) if each)
        reports.report_probe(
            ProbeReport(
                policy_version=work.policy_version,
                logprobs=logprobs,
                reference=next(iter(reference), None),
                producer=producer,
            )
        )


def _exhaust(weights: Weights) -> None:
    deque(weights, maxlen=0)


def _announce(backend: "Backend", text: str) -> None:
    """Broadcast a text from rank 0 to the head ranks of the other pipeline stages."""
    backend.broadcast_text(text)
