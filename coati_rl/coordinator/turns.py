"""Decide whose turn it is where producers and trainers share devices.

Producers begin. Their turn ends when the prompts of a rollout step are finished and evaluations answered, that of the
trainers when their weights are staged and they have nothing left to train. Weights that engines gave up with their turn
are sent again before their next one, so that a turn ends with a sync even where no step was taken.
"""

from coati_rl.coordinator.evaluation import EvaluationRounds
from coati_rl.coordinator.membership import Membership
from coati_rl.coordinator.prompt_flow import PromptFlow
from coati_rl.work import HandOverWork, Side, Wait


class Turns:
    """Hold whose turn it is; called under the coordinator's lock."""

    def __init__(self, members: Membership, flow: PromptFlow, evaluation: EvaluationRounds, *, are_taken: bool) -> None:
        """Begin with the producers' turn; where there are no turns (`are_taken` is False), both sides always work."""
        self._members = members
        self._flow = flow
        self._evaluation = evaluation
        self._are_taken = are_taken
        self._of: Side = "producers"

    @property
    def is_of_producers(self) -> bool:
        """Return True if trainers have to wait for the devices."""
        return self._are_taken and self._of == "producers"

    @property
    def is_of_trainers(self) -> bool:
        """Return True if producers have to wait for the devices."""
        return self._are_taken and self._of == "trainers"

    def end_producers(self, *, is_over: bool) -> HandOverWork | Wait:
        """End the producers' turn, or return what it lasts for."""
        members, is_stopped = self._members, self._flow.is_stopped
        if members.is_committing and not is_stopped:
            return Wait(reason=f"waiting for {members.committing}, in the producers' turn")
        if members.has_current and not is_stopped:  # else none can answer before it gets weights
            if self._evaluation.is_running:
                return self._evaluation.wait
            if not is_over and not self._flow.is_rolled_out:
                return self._flow.wait_for_rollouts()
        elif not members.ids and not self._flow.is_rolled_out:
            return Wait(reason=members.missing or "waiting for a producer")
        self._of = "trainers"
        members.put_to_sleep()
        return HandOverWork(to="trainers", members=members.ids)

    def is_trained(self, *, is_over: bool) -> bool:
        """Return True if the trainers have nothing left to do in their turn, and the run goes on."""
        last = self._members.is_committing if is_over else not self._flow.has_mini_batch
        return self._evaluation.is_running or last

    def end_trainers(self) -> HandOverWork:
        """End the trainers' turn."""
        self._of = "producers"
        return HandOverWork(to="producers", members=self._members.ids)
