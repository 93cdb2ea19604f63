"""Load the advantage estimator that a configuration names, built in or a user's own, without torch."""

import numpy as np

from coati_rl.algorithms.advantage import ADVANTAGE_ESTIMATORS, GAE, GDPO, Estimator, group_advantages
from coati_rl.errors import ConfigError
from coati_rl.plugins import is_plugin, load_function


def load_estimator(name: str) -> Estimator:
    """Return one of ADVANTAGE_ESTIMATORS, or a user's: float64[N] rewards of a group's valid samples to float64[N].

    Raises: ConfigError for an unknown name, and if it cannot be loaded or fails on a group of two.
    """
    if not is_plugin(name):
        # GDPO: of each reward by itself; GAE: the reward, in place of which the critic's trainer has advantages.
        built_in = {GDPO: "group_norm", GAE: "reward"}.get(name, name)
        if built_in not in ADVANTAGE_ESTIMATORS:
            known = ", ".join(sorted({*ADVANTAGE_ESTIMATORS, GDPO, GAE}))
            raise ConfigError(f"--advantage-estimator {name}: unknown; use {known}, or FILE.py:FUNCTION")
        return ADVANTAGE_ESTIMATORS[built_in]
    estimator: Estimator = load_function(name, flag="--advantage-estimator")
    for rewards in ([1, 0], [1, 1], [1]):  # equal rewards have no deviation, and a single sample may be valid
        try:
            group_advantages(
                np.array(rewards, dtype=np.float64), np.ones(len(rewards), dtype=bool), estimator=estimator
            )
        except Exception as error:
            raise ConfigError(
                f"--advantage-estimator {name}: fails on rewards {rewards}: {type(error).__name__}: {error}; it takes "
                "float64[N] rewards of a group and returns as many advantages"
            ) from error
    return estimator
