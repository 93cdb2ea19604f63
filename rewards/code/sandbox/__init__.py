"""Run programs that nobody trusts, and leave nothing behind."""

from rewards.code.sandbox.box import Sandbox, SandboxError, check_sandbox
from rewards.code.sandbox.limits import Limits, Outcome

__all__ = ["Limits", "Outcome", "Sandbox", "SandboxError", "check_sandbox"]
