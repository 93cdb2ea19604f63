"""Run untrusted programs in a sandbox."""

from coati_rl.sandbox.box import Sandbox, SandboxError, check_sandbox
from coati_rl.sandbox.limits import Limits, Outcome
from coati_rl.sandbox.session import PythonSession

__all__ = ["Limits", "Outcome", "PythonSession", "Sandbox", "SandboxError", "check_sandbox"]
