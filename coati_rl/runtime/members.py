"""Place members of engines or trainers in Ray actors, and call them there."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from coati_rl.members import Arguments
from coati_rl.processes.actor_process import ActorContext, device_environment, enter_actor
from coati_rl.runtime.cluster import actor_options
from coati_rl.runtime.placement_manager import Reservation
from coati_rl.runtime.remote import wait_for
from coati_rl.runtime.waits import as_ready
from coati_rl.types import Device

CALL_TIMEOUT_S = 4 * 3600.0  # collectives and transfers in a call have shorter ones


class MemberActor:
    """Hold one member in a process of its own."""

    def __init__(self, context: ActorContext, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        enter_actor(context)
        self._member = make(*arguments)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of the member."""
        return getattr(self._member, method)(*arguments)


class RemoteMembers:
    """Implement `Members` with an actor in each of some reserved places."""

    def __init__(
        self,
        name: str,
        places: Sequence[Reservation],
        make: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        device: Device,
        precision: str,
        environment: dict[str, str],
        log_dir: Path,
    ) -> None:
        """Start the actors, without waiting for them.

        Args:
            name: of the actors, with a number behind it.
            places: one for each.
            make: makes the member, of `arguments`, in its actor.
            arguments: of `make`.
            device: of all of them.
            precision: "fp32" or "bf16".
            environment: variables that are set before a process starts.
            log_dir: of their output.
        """
        self.size = len(places)
        self._name = name
        self._actors = list[Any]()
        for number, place in enumerate(places):
            context = ActorContext(
                name=f"{name}-{number}",
                log_dir=log_dir,
                device=device,
                dtype="bfloat16" if precision == "bf16" else "float32",
                slot=place.slot,
                num_slots=place.num_slots,
                gpus=place.gpus,
            )
            variables = {**device_environment(device, precision), **environment}
            options = {
                **actor_options(name=context.name, num_threads=place.num_threads, environment=variables),
                "num_cpus": place.need.cpus,
                "num_gpus": place.need.gpus,
                "scheduling_strategy": place.strategy,
            }
            self._actors.append(ray.remote(MemberActor).options(**options).remote(context, make, arguments))

    def call(self, method: str, arguments: Arguments) -> list[Any]:
        """See `Members`. Raises: what a member raises; PeerLostError if its process has ended or does not answer."""
        return self.begin(method, arguments)()

    def begin(self, method: str, arguments: Arguments) -> Callable[[], list[Any]]:
        pairs = zip(self._actors, arguments, strict=True)
        references = [actor.call.remote(method, own) for actor, own in pairs]
        return lambda: self._results(references, method)

    def _results(self, references: list[Any], method: str) -> list[Any]:
        """Wait for all results; the first error ends it, as the others may then wait for that member."""
        results = dict[Any, Any]()
        for reference in as_ready(references, timeout_s=CALL_TIMEOUT_S):
            who = f"{self._name}-{references.index(reference)}, asked to {method},"
            results[reference] = wait_for(reference, who=who, timeout_s=1.0)
        return [results[reference] for reference in references]
