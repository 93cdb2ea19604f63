"""Set the devices and the Ray cluster of a run, and how long its processes may be silent."""

from typing import Literal

from coati_rl.config.fields import Section, execution
from coati_rl.config.user_paths import OptionalPath


class ClusterConfig(Section):
    """Devices, Ray, ports, timeouts of processes."""

    device: Literal["auto", "cpu", "cuda"] = execution(
        "auto", "Where engines and trainers run; auto takes GPUs if any."
    )
    ray_dir: OptionalPath = execution(
        None,
        "Directory in which a Ray started here keeps sockets and logs, in one of the run's own; default: temporary.",
        spelling="--ray_dir",
    )
    master_address: str | None = execution(
        None, "Address of a running Ray cluster's head; default: start Ray here.", spelling="--master_address"
    )
    master_port: int = execution(
        0,
        "Port at which the trainers meet; default: a free one, and none where Ray is started here.",
        spelling="--master_port",
        ge=0,
        le=65535,
    )
    stall_timeout_s: float = execution(1800.0, "A run in which nothing finishes for so long is stopped, seconds.", gt=0)
    heartbeat_timeout_s: float = execution(
        30.0, "A producer that gives no sign of life for so long is replaced; a trainer ends the run, seconds.", ge=5
    )
    phase_timeout_s: float = execution(
        60.0,
        "The same for a phase, such as an optimizer step, that takes so long and ten times its own median, seconds; "
        "the first of its kind may take ten times as long.",
        ge=1,
    )
