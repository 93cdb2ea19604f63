"""Set how weights get to the producers: the way they travel, when they are swapped in, how a sync is proved."""

from typing import Literal

from coati_rl.config.fields import Section, execution, experiment

OnLogprobGap = Literal["stop", "tis", "icepop", "sequence_mask"]
TransportChoice = Literal["auto", "nccl", "gloo", "shm", "ipc", "file"]


class SyncConfig(Section):
    """How new weights reach the producers, and how the gap of engine and trainer is measured."""

    n_behind: int = experiment(
        0, "Rollout steps that producers may run ahead; bounds staleness in syncs. 0 is lockstep.", short="-nb", ge=0
    )
    inflight_update: bool = execution(
        False,
        "Swap new weights in between two engine steps, while responses are being generated; they go on under the new "
        "weights, and each token carries the version that sampled it. Without: when no response is being generated.",
    )
    partial_rollouts: bool = execution(
        False,
        "Responses that a rollout step leaves unfinished go on in the next one under its weights, as with "
        "--inflight-update, and a prompt begins as soon as samples of others have ended: an engine decodes imbs * g "
        "samples, of as many prompts as it takes. Needs --n-behind 1 or more.",
    )
    weight_transport: TransportChoice = execution(
        "auto",
        "How weights travel: nccl and ipc (CUDA IPC, one node) between GPUs, shm (shared memory, one node), gloo, or "
        "file (safetensors in the run directory, which all nodes share). auto: nccl on GPUs, shm on one node, or gloo.",
    )
    sync_deltas: bool = execution(
        False,
        "Files hold what differs from the last update, bit for bit and compressed, once all producers have proved that "
        "by its digest; the trainers then keep a copy of the weights in host memory.",
        needs={"weight_transport": ("file",)},
    )
    sync_timeout_s: float = execution(
        60.0,
        "Deadline of a weight transfer, and of an in-flight swap, seconds. Unless given, a second more for each whole "
        "0.5 GB of weights.",
        gt=0,
    )
    probe_interval: int = execution(
        1, "Weight syncs between two measurements of the engine-trainer gap; a producer's first is always one.", ge=1
    )
    logprob_gap_tokens: int = execution(
        256,
        "Tokens of a step, at least, on which the gap to weights of earlier syncs is measured where these sampled: "
        "with -nb, or several steps per sync. Copies of them stay in host memory; 0: none, logprob_gap_mean is null. "
        "In bf16 also the tokens that are scored in float32, too; 0: the gap of sampled tokens is not judged.",
        ge=0,
    )
    max_logprob_gap: float | None = execution(
        None,
        "Engine-trainer gap of log-probabilities, nats, past which --on-logprob-gap acts. Default: 1e-4 in fp32; in "
        "bf16 twice the trainer's own rounding of the same tokens, and its statistical error.",
        gt=0,
    )
    on_logprob_gap: OnLogprobGap = execution(
        "stop",
        "What a gap past the limit does: stop the run with a diagnosis, or from then on correct for it (tis, icepop, "
        "sequence_mask: see --off-policy-correction).",
    )

    @property
    def judges_rounding(self) -> bool:
        """Return True if the limit in bfloat16 is what rounding explains."""
        return self.max_logprob_gap is None

    @property
    def commits_in_flight(self) -> bool:
        """Return True if weights change while responses are being generated."""
        return self.inflight_update or self.partial_rollouts
