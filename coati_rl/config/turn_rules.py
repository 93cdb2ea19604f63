"""Check the settings of runs in which producers and trainers share devices."""

from collections.abc import Iterator

from coati_rl.config.config import Config


def turn_problems(config: Config) -> Iterator[str]:
    """Why producers and trainers cannot take turns like this, each with a remedy."""
    parallel = config.parallel
    if not parallel.colocate:
        return
    if config.sync.inflight_update:
        yield "--colocate with --inflight-update: no request runs when weights change; leave it out"
    engines, width = parallel.num_inferencer, parallel.producer_tensor_parallel_size
    if engines * width > parallel.num_trainers:
        yield (
            f"--colocate with -i {engines} of -ptp {width} and -t {parallel.num_trainers}: engines have the trainers' "
            f"devices, and {engines * width} are more than {parallel.num_trainers}; use -i "
            f"{max(1, parallel.num_trainers // width)}, or -t {engines * width}"
        )
