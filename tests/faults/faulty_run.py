"""Run rl_example.py with faulty actors: the flags are the same, COATI_FAULTS has the faults (see faulty_actors)."""

import functools
import sys
from pathlib import Path

import rl_example
from coati_rl.config.cli import parse
from coati_rl.processes.ray_environment import prepare_ray_environment
from coati_rl.processes.subreaper import run_under_subreaper


def main(argv: list[str], scratch: Path) -> int:
    """The run; `rl_example` imports the actors' classes when it needs them, so that it finds these."""
    config, _ = parse(argv)
    prepare_ray_environment(config)  # before anything imports Ray
    from faulty_actors import FaultyProducer, FaultyTrainer

    import consumer.actor
    import producer.actor

    consumer.actor.TrainerActor, producer.actor.ProducerActor = FaultyTrainer, FaultyProducer
    return rl_example.main(argv, scratch)


if __name__ == "__main__":
    sys.exit(run_under_subreaper(functools.partial(main, sys.argv[1:])))
