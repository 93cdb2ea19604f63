"""Let modules of OpenRLHF and RL4LLM be imported where these systems are not installed.

Only what their documents have users import is there. A system that is installed is imported itself. The modules stay
importable for the life of the process, since users also import inside of functions.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_OPENRLHF, _RL4LLM = "coati_rl.stand_ins.openrlhf", "coati_rl.stand_ins.rl4llm"
# By the module of the other system: ours, and the names of it that are there.
_MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "openrlhf.utils.agent": (
        _OPENRLHF,
        ("AgentInstanceBase", "AgentExecutorBase", "MultiTurnAgentExecutor", "SingleTurnAgentExecutor"),
    ),
    "openrlhf.utils.logging_utils": (_OPENRLHF, ("init_logger",)),
    "rl4llm.constants": (_RL4LLM, ("LOGGER_NAME",)),
    "rl4llm.core.base_env": (
        _RL4LLM,
        ("ChatMessage", "SampleState", "EnvState", "EpisodeData", "BaseRewardFunction", "BaseMDPEnv"),
    ),
    "rl4llm.core.base_inference_client": (_RL4LLM, ("InferenceClient",)),
    "rl4llm.envs": (_RL4LLM, ("SglMDPEnv",)),
    "rl4llm.envs.sgl_env": (_RL4LLM, ("SglMDPEnv",)),
}
_PACKAGES = {name.rsplit(".", depth)[0] for name in _MODULES for depth in range(1, name.count(".") + 1)}
_SYSTEMS = {"openrlhf": "OpenRLHF", "rl4llm": "RL4LLM"}
_NEVER = {"RL2": "RL2", "vllm": "vLLM"}  # that files of these systems import, and that have no stand-in
_MARK = "__coati_rl_stand_in__"


def install() -> None:
    """Let the modules be imported in this process; again: nothing."""
    if not any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        sys.meta_path.insert(0, _StandIns())  # before a directory of the system's name, as a clone of it leaves


def remedy(error: BaseException) -> str:
    """Return what to change in a file whose import failed as it needs more of another system; empty for others."""
    name = getattr(error, "name", None) if isinstance(error, ImportError) else None
    system = (name or "").partition(".")[0]
    if system in _NEVER:
        return f"; {_NEVER[system]} is not installed: leave this import out, and what needs it, or install it"
    if system not in _SYSTEMS or not _is_ours(sys.modules.get(system)):
        return ""
    there = ", ".join(f"{module} ({', '.join(names)})" for module, (_, names) in _MODULES.items() if system in module)
    return (
        f"; {_SYSTEMS[system]} is not installed, and without it a file can import {there}: keep the agent and its "
        f"rewards in a file without other imports of {system}, or install it"
    )


class _StandIns(MetaPathFinder, Loader):
    """Find and load the modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that is stood in for; None for any other."""
        system, _, rest = fullname.partition(".")
        if system not in _SYSTEMS or fullname not in {*_MODULES, *_PACKAGES}:
            return None
        if not (_is_ours(sys.modules.get(system)) if rest else not self._is_installed(system)):
            return None
        return ModuleSpec(fullname, self, is_package=fullname in _PACKAGES)

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module."""
        setattr(module, _MARK, True)
        source, names = _MODULES.get(module.__name__, ("", ()))
        for name in names:
            setattr(module, name, getattr(importlib.import_module(source), name))

    def _is_installed(self, system: str) -> bool:
        """Return True if another finder has the system, and not only a directory of its name."""
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(system, None)
            if spec is None:
                continue
            parts = {name.split(".")[1] for name in _MODULES if name.startswith(f"{system}.")}
            places = [Path(place) for place in spec.submodule_search_locations or ()]
            return spec.origin is not None or any((place / part).is_dir() for place in places for part in parts)
        return False


def _is_ours(module: ModuleType | None) -> bool:
    return getattr(module, _MARK, False) is True
