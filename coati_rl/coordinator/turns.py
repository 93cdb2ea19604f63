"""Decide whose turn it is where producers and trainers share devices.

Producers begin. Their turn ends when the prompts of a rollout step are finished and evaluations answered, or when none
of them has weights; that of the trainers when they have nothing left to train. Their last steps make a sync due, so
that every engine, which gave its weights up, has staged new ones by then.
"""

from typing import ClassVar

from coati_rl.coordinator.evaluation import EvaluationRounds
from coati_rl.coordinator.membership import Membership
from coati_rl.coordinator.prompt_flow import PromptFlow
from coati_rl.work import HandOverWork, Side, Wait


class Turns:
    """Hold whose turn it is; called under the coordinator's lock."""

    KEPT: ClassVar = ("_of", "_is_for_weights")

    def __init__(self, members: Membership, flow: PromptFlow, evaluation: EvaluationRounds, *, are_taken: bool) -> None:
        """Begin with the producers' turn; where there are no turns (`are_taken` is False), both sides always work."""
        self._members = members
        self._flow = flow
        self._evaluation = evaluation
        self._are_taken = are_taken
        self._of: Side = "producers"
        self._is_for_weights = False  # the trainers' turn: engines that have none get theirs, and nothing is trained

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
                return self._flow.wait_for_rollout_step()
        elif not members.ids and not self._flow.is_rolled_out:
            return Wait(reason=members.missing or "waiting for a producer")
        self._of = "trainers"
        self._is_for_weights = not is_over and not self._flow.is_rolled_out
        return HandOverWork(to="trainers", members=members.ids)

    def is_trained(self, *, is_over: bool) -> bool:
        """Return True if the trainers have nothing left to do in their turn, and the run goes on."""
        if self._evaluation.is_running or self._members.is_committing:  # engines have staged what they wait for
            return True
        return not is_over and (self._is_for_weights or not self._flow.has_mini_batch)

    def may_send(self, *, is_due: bool, is_over: bool) -> bool:
        """Return True if weights may be sent: commits wait for the end of the trainers' turn, so only one sync fits."""
        return is_due or not self.is_of_trainers or self.is_trained(is_over=is_over)

    def end_trainers(self) -> HandOverWork:
        """End the trainers' turn."""
        self._of = "producers"
        return HandOverWork(to="producers", members=self._members.ids)
