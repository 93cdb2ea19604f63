"""Send a rank's weights to the engines of a program of one's own, by calls."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from coati_rl.transport.manifest import TensorEntry, WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.transport.wire import WeightSender
from consumer.parallel.layout import Layout
from consumer.weight_sync.publisher import iterate_to_end


class Exporter(Protocol):
    """Declare what is sent of a model; `Backend` has it."""

    layout: Layout

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""

    def weight_entries(self) -> tuple[TensorEntry, ...]:
        """Return the entries of all tensors that all senders export, in order."""

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full tensors that this rank sends, by name; collective."""

    def base_identity(self) -> str:
        """Return the identity of the base whose adapters alone are exported; empty: all weights are."""


def make_manifest(model: Exporter, version: int) -> WeightManifest:
    """Return the manifest of what all pipeline stages send, in Hugging Face order."""
    return WeightManifest(policy_version=version, entries=model.weight_entries(), base=model.base_identity())


class RankSender:
    """Invite engines, and send to them; methods are collective over the ranks."""

    def __init__(self, model: Exporter, sender: WeightSender) -> None:
        """Take the model, and this rank's end of transfers."""
        self._model, self._sender = model, sender
        self._group: tuple[int, ...] = ()  # of the open transfer group: the engines' number and their ranks
        self._invited: tuple[list[str], list[str]] = ([], [])  # engines and senders, as JSON

    def open(self, number: int, sizes: Sequence[int], policy_version: int) -> tuple[str, list[str], list[str]] | None:
        """Invite engines and the other senders, unless they are in the group of the last transfer.

        Args:
            number: of the engines' client in its program.
            sizes: ranks of each engine.
            policy_version: of the weights to be sent.
        Returns: on the first rank, as JSON: the manifest, the engines' invitations, and the senders', if they are new.
        """
        layout = self._model.layout
        if layout.sender != 0:
            return None
        if self._group != (number, *sizes) or not self._sender.is_open:
            engines = self._sender.open(sizes, num_senders=layout.num_senders)
            self._invited = [e.to_json() for e in engines], [s.to_json() for s in self._sender.sender_invitations]
            self._group, invited = (number, *sizes), self._invited
        else:
            invited = self._invited[0], []
        return make_manifest(self._model, policy_version).to_json(), *invited

    def send(self, manifest: str, senders: Sequence[str], timeout_s: float) -> str:
        """Send this rank's weights to the engines that were invited. Returns: the digest; empty if it sends none."""
        number, weights = self._model.layout.sender, self._model.export_weights()
        if number is None:
            deque(weights, maxlen=0)  # others gather its part
            return ""
        with iterate_to_end(weights):
            if number > 0 and senders:
                self._sender.join(Rendezvous.from_json(senders[number - 1]))
            return self._sender.send(WeightManifest.from_json(manifest), weights, timeout_s=timeout_s)

    def close(self) -> None:
        """Give the memory of transfers back, and leave the engines; the next `open` invites them again."""
        self._sender.close()
