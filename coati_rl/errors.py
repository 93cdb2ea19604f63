"""Define the errors: a user's mistake is a ConfigError (exit 2), all else that ends a run a RunError (exit 1).

Every error is built from one message, so that it can be pickled by Ray.
"""


class CoatiError(Exception):
    """Serve as base of all errors that this project raises on purpose."""


class ConfigError(CoatiError):
    """Report a user's mistake before anything starts. The message names field, value and remedy."""


class RunError(CoatiError):
    """Report that a run cannot continue. The message is the one line that the user sees."""


class EngineError(RunError):
    """Report that a generation or training engine refused or failed an operation."""


class CoordinatorReplacedError(CoatiError):
    """Report to a producer that another coordinator has taken over: it says what it holds, and calls again."""


class RolloutError(CoatiError):
    """A prompt cannot be rolled out. It is recorded and counted, and the run goes on."""


class ContextLengthError(RolloutError):
    """Report that a context leaves no token for an answer."""


class CollectiveError(EngineError):
    """Report that a collective of the trainers failed, most likely as another trainer ended or hangs."""


class TransferError(RunError):
    """Report a failed weight transfer: a peer died, a deadline passed, or the data differ from the manifest."""


class TransferTimeoutError(TransferError):
    """Report that a weight transfer passed its deadline. The message names rank, phase and bucket."""


class RunOverError(CoatiError):
    """Report to a producer that has joined a run that there is nothing more to do."""


class PeerLostError(RunError):
    """Report that another process is dead, or did not answer within its deadline. The message names it."""
