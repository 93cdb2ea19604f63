"""Run programs that nobody trusts, and leave nothing behind."""

from coati_rl.sandbox.box import Sandbox, SandboxError, check_sandbox
from coati_rl.sandbox.limits import Limits, Outcome

__all__ = ["Limits", "Outcome", "Sandbox", "SandboxError", "check_sandbox"]
