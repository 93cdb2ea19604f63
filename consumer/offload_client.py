"""Ask the ranks of a trainer to take its models off their device, and know what is there."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Self

from coati_rl.errors import ConfigError, RunError
from coati_rl.members import Members

Part = Literal["weights", "optimizer"]
PARTS: tuple[Part, ...] = ("weights", "optimizer")


class OffloadClient:
    """Serve as base of trainers whose ranks have `cpu`, `cuda`, `meta` and `close`."""

    after_meta = ""  # the call that brings models back after `meta`

    def __init__(self, members: Members) -> None:
        """Use ranks that have their models on the device."""
        self.members = members
        self._absent: dict[str, str] = {}  # parts that are not on the device, and what brings them back

    def cpu(self, *parts: Part) -> None:
        """Take parts of the models off the device between two steps, for an engine there; none are named: all parts.

        They are kept in pinned host memory; on a machine without a GPU in a file without a name, in $TMPDIR.

        Args:
            parts: "weights" of all models; "optimizer": float32 masters beside bfloat16 weights, and its states.
        Raises: RunError if there is no room for them.
        """
        self._check(parts)
        self.each("cpu", parts or PARTS)
        self._absent = dict.fromkeys(parts or PARTS, "trainer.cuda()") | self._absent

    def cuda(self, *parts: Part) -> None:
        """Bring these parts back to the device, bit for bit; none are named: all parts."""
        self._check(parts)
        if self.after_meta in self._absent.values():
            raise RunError(f"the trainer's models were dropped by meta(): {self.after_meta}")
        self.each("cuda", parts or PARTS)
        self._absent = {part: how for part, how in self._absent.items() if part not in (parts or PARTS)}

    def meta(self) -> None:
        """Drop the models, on the device and on the host."""
        self.each("meta")
        self._absent = dict.fromkeys(PARTS, self.after_meta)

    def close(self) -> None:
        """Release the models."""
        self.each("close")

    def each(self, method: str, *arguments: Any) -> list[Any]:
        """Call all ranks with the same arguments. Returns: the result of each."""
        return self.members.call(method, [arguments] * self.members.size)

    def need(self, *parts: Part) -> None:
        """Raise RunError unless these parts are on the device."""
        if absent := [part for part in parts if part in self._absent]:
            raise RunError(f"the trainer's {absent[0]} must be on its device: {self._absent[absent[0]]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _check(self, parts: Sequence[str]) -> None:
        if unknown := [part for part in parts if part not in PARTS]:
            raise ConfigError(f'a trainer has {" and ".join(PARTS)}, and no "{unknown[0]}"')
