"""Runs programs that nobody trusts: source and input flow in, an outcome flows out, and nothing stays behind."""

from rewards.code.sandbox.box import Sandbox, SandboxError, check_sandbox
from rewards.code.sandbox.limits import Limits, Outcome

__all__ = ["Limits", "Outcome", "Sandbox", "SandboxError", "check_sandbox"]
