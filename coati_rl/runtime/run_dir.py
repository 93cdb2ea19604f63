"""The run directory: made new for every run, with the resolved configuration in it."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from coati_rl.config import Config
from coati_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPaths:
    """Where a run writes."""

    run_dir: Path
    checkpoints: Path
    evaluation: Path
    rollouts: Path
    logs: Path


def make_run_dir(config: Config) -> RunPaths:
    """Create the directory; where one exists, runs/name-2, runs/name-3, ... so that two runs are never mixed.

    Raises: ConfigError if it cannot be created.
    """
    wanted = Path(config.run_dir) if config.run_dir else Path("runs") / config.project
    wanted = wanted.absolute()
    for number in range(1, 10_000):
        run_dir = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            run_dir.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"--run-dir {run_dir}: cannot be created: {error.strerror}") from error
        break
    paths = RunPaths(
        run_dir=run_dir,
        checkpoints=Path(config.save_dir).absolute() if config.save_dir else run_dir / "checkpoints",
        evaluation=Path(config.eval_save_dir).absolute() if config.eval_save_dir else run_dir / "eval",
        rollouts=Path(config.rollout_save_dir).absolute() if config.rollout_save_dir else run_dir / "rollouts",
        logs=run_dir / "logs",
    )
    paths.logs.mkdir()
    resolved = config.model_dump(mode="json")
    (run_dir / "config.yaml").write_text(yaml.safe_dump(resolved, sort_keys=False), encoding="utf-8")
    return paths
