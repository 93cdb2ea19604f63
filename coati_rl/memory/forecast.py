"""Add up the forecast of a run's processes by device and by host, and say it in lines. Bytes; printed in GiB."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from coati_rl.memory.trainer import Parts
from coati_rl.types import Device

GIB = 2**30
ENGINE_RANK = "engine rank"  # the name of an engine's processes
MARGIN = 0.15  # how far the forecast may be from what is used: what exceeds the memory by less is warned of


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMemory:
    """Hold the memory of equal processes, each by its parts."""

    name: str  # "trainer", "engine rank"
    count: int
    parts: Parts  # on the device that it computes on
    host: Parts = field(default_factory=dict)  # besides, in host memory
    shared: Parts = field(default_factory=dict)  # in host memory, once for every `together` processes on one host
    together: int = 1
    unknown: str = ""  # what is not in the parts, and why

    @property
    def device_bytes(self) -> int:
        """Bytes of one process on its device."""
        return sum(self.parts.values())

    def on_host(self, device: Device) -> Parts:
        """Return the parts of one process in host memory, if it computes on this device."""
        return {**self.host, **self.parts} if device == "cpu" else self.host

    def host_bytes(self, device: Device) -> int:
        """Bytes of all these processes in host memory, if they compute on this device."""
        groups = -(-self.count // self.together)
        return self.count * sum(self.on_host(device).values()) + groups * sum(self.shared.values())

    def on_one_host(self, device: Device) -> Parts:
        """Return the parts in host memory of the processes that share some of it."""
        of_each = {name: self.together * size for name, size in self.on_host(device).items()}
        return {**of_each, **self.shared}


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Hold the memory of a run's processes at their peaks."""

    device: Device
    processes: tuple[ProcessMemory, ...]
    shared: Parts = field(default_factory=dict)  # in host memory, used by processes of all kinds
    is_one_host: bool = True
    takes_turns: bool = False  # engines have given their memory up while trainers train, and the other way round

    def without(self, part: str) -> "Forecast":
        """Return the forecast without a part of its processes."""
        processes = [
            replace(each, parts={name: count for name, count in each.parts.items() if name != part})
            for each in self.processes
        ]
        return replace(self, processes=tuple(processes))

    @property
    def host_bytes(self) -> int:
        """Bytes of all processes in host memory."""
        on_host = sum(self.shared.values()) + sum(each.host_bytes(self.device) for each in self.processes)
        return on_host - self._given_up() if self.takes_turns and self.device == "cpu" else on_host

    def _given_up(self) -> int:
        """Bytes of the side with less memory, which it has only in its own turn."""
        of_turn = dict.fromkeys(("trainer", ENGINE_RANK), 0)
        for each in self.processes:
            if each.name in of_turn:
                of_turn[each.name] += each.count * each.device_bytes
        return min(of_turn.values())

    @property
    def largest(self) -> ProcessMemory:
        """The process with the most memory on its device."""
        return max(self.processes, key=lambda each: each.device_bytes)

    def lines(self) -> list[str]:
        """One line a kind of process, and one of the host, for people."""
        where = " of its GPU" if self.device == "cuda" else ""
        lines = [
            f"{f'memory, {each.name}':<24}{gib(each.device_bytes)}{where}: {listed(each.parts)}"
            f"{f' ({each.unknown})' if each.unknown else ''}"
            for each in self.processes
        ]
        if not self.is_one_host:
            lines += [self._host_line(each) for each in self.processes]
        who = ", ".join(f"{each.count} x {each.name}" for each in self.processes)
        who += ", in turns" if self.takes_turns else ""
        of_all = "host" if self.is_one_host else "all hosts"
        shared = f"; {listed(self.shared)}" if any(self.shared.values()) else ""
        return [*lines, f"{f'memory, {of_all}':<24}{gib(self.host_bytes)}: {who}{shared}"]

    def _host_line(self, process: ProcessMemory) -> str:
        """Say what one process, or those that share memory, take of the host that they are on."""
        parts = process.on_one_host(self.device)
        who = process.name if process.together == 1 else f"{process.together} x {process.name}"
        return f"{f'host of {who}':<24}{gib(sum(parts.values()))}: {listed(parts)}"


def gib(count: int) -> str:
    """Return bytes as text in GiB, or in MiB below a tenth of one."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.0f} MiB"


def listed(parts: Parts) -> str:
    """Return the parts with their sizes, the largest first, without empty ones."""
    ordered: Iterable[tuple[str, int]] = sorted(parts.items(), key=lambda each: -each[1])
    return ", ".join(f"{name} {gib(count)}" for name, count in ordered if count)
