"""Say once why the loss of a step is 0: there was nothing to learn from, or the value says nothing about the gradient.

Input: step records in order. Output: a line for people, the first time that a cause is seen. A loss counts as 0 where
the line of its step shows 0.
"""

from typing import Any

_SHOWN_AS_0 = 5e-5  # lines of steps have four digits after the point
_NO_GRADIENT = {  # shares of tokens, and what it is that leaves those without a gradient
    "clip_fraction": "the clip stops the gradient of all tokens",
    "correction_dropped_fraction": "the off-policy correction drops all tokens",
    "masked_token_fraction": "--off-policy-mask-threshold masks all tokens",
}

Record = dict[str, Any]


class ZeroLoss:
    """Watch the records of a run or a job."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def line(self, record: Record) -> str | None:
        """Take the next record. Returns: why its loss is 0; None if it is not, or the cause was told before."""
        loss = record.get("loss")
        if record.get("update") or (loss is not None and abs(loss) >= _SHOWN_AS_0):
            return None  # what a batch's later updates learn from came in with the first one
        if "groups_total" in record:
            kind, cause = _of_rollouts(record)
        elif loss is not None:
            kind, cause = _of_dataset(record)
        else:
            return None
        if kind in self._told:
            return None
        self._told.add(kind)
        return f"{'no loss' if loss is None else f'loss {loss:.2g}'} at step {record['step']}: {cause}"


def _of_rollouts(record: Record) -> tuple[str, str]:
    """Return the kind of the cause, and the cause."""
    groups, gradient = record["groups_total"], record.get("grad_norm") or 0.0
    if record.get("constant_group_fraction") == 1:
        right, wrong = record.get("groups_all_correct", 0), record.get("groups_all_wrong", 0)
        which = f"all {groups} groups" if right + wrong == groups else f"of {groups} groups all that can be compared"
        equal = f"{which} have equal rewards ({right} all right, {wrong} all wrong)"
        if not gradient:
            return "equal", f"{equal}: nothing to learn from"
        return "equal, other terms", f"{equal}: the gradient (norm {gradient:.2g}) is of other terms than these rewards"
    if not record.get("samples_in_loss"):
        return "empty", f"no sample is in the loss: {record['groups_filtered']} of {groups} groups are left out"
    if gradient:
        return "centred", (
            "a group's advantages have mean 0, so that better and worse answers cancel in the value while the policy "
            f"is the one that sampled them; not in the gradient (norm {gradient:.2g}): watch the reward"
        )
    for key, cause in _NO_GRADIENT.items():
        if (record.get(key) or 0.0) == 1:
            return key, cause
    return "unknown", "there is no gradient either, though rewards differ: see clip_fraction and ratio_max"


def _of_dataset(record: Record) -> tuple[str, str]:
    if record.get("loss_tokens") == 0:
        return "empty", "no token is in the loss: see which parts of a row are trained, and --max-length"
    return "fitted", "the rows of the step are fitted; where a held-out set's loss (-ed) is larger, they are memorised"
