"""The error tree. A user's mistake is a ConfigError (exit 2); everything else that ends a run is a RunError (exit 1).

Every error is built from one message, so that it survives pickling on its way through Ray.
"""


class CoatiError(Exception):
    """Base of all errors that this project raises on purpose."""


class ConfigError(CoatiError):
    """A user's mistake, found before anything starts. The message names field, value and remedy."""


class RunError(CoatiError):
    """A run cannot go on. The message is the one line that the user sees."""


class EngineError(RunError):
    """A generation or training engine refused or failed an operation."""


class RolloutError(CoatiError):
    """A prompt cannot be rolled out. It is recorded and counted, and the run goes on."""


class CollectiveError(EngineError):
    """A collective of the trainers broke off, most likely as another one ended or hangs. It names the operation."""


class TransferError(RunError):
    """A weight transfer failed: a peer died, a deadline passed, or what arrived is not what was announced."""


class TransferTimeoutError(TransferError):
    """A weight transfer passed its deadline. The message names rank, phase and bucket."""


class PeerLostError(RunError):
    """Another process of the run is dead, or did not answer within its deadline. The message names it."""
