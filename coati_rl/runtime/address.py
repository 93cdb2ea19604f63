"""Tell an actor its address; Ray is imported where it is asked, as on one machine nothing else needs it."""

from coati_rl.config.training import TrainingConfig


def own_address(config: TrainingConfig) -> str:
    """Return the address at which other actors of the run reach this process's node."""
    if not config.cluster.master_address:
        return "127.0.0.1"
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
