"""Apply all rules to a run, and rank what they find: the most probable root cause first."""

from collections.abc import Sequence
from itertools import chain

from coati_rl.doctor import data_rules, engine_rules, policy_rules, reward_rules, system_rules, update_rules
from coati_rl.doctor.rule import Finding, Rule
from coati_rl.doctor.run_data import RunData

# Of equal severity the earlier one is the likelier root: data, then engine, reward, policy and machine.
RULES: tuple[Rule, ...] = (
    *data_rules.RULES,
    *engine_rules.RULES,
    *reward_rules.RULES,
    *update_rules.RULES,
    *policy_rules.RULES,
    *system_rules.RULES,
)


def diagnose(run: RunData, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Return what was found: root causes, the worst first, then what follows from them."""
    found = {rule.cause: evidence for rule in rules if (evidence := rule.find(run)) is not None}
    parents = {rule.cause: [each.cause for each in rules if rule.cause in each.leads_to] for rule in rules}
    findings = [
        Finding(
            cause=rule.cause,
            says=rule.says,
            evidence=found[rule.cause],
            remedy=rule.remedy,
            severity=rule.severity,
            follows_from=tuple(parent for parent in parents[rule.cause] if parent in found),
        )
        for rule in rules
        if rule.cause in found
    ]
    return sorted(findings, key=lambda each: (bool(each.follows_from), -each.severity))  # stable


def circles(rules: Sequence[Rule] = RULES) -> list[str]:
    """Return causes that lead to themselves by way of others: there are none, or a run could lack a root."""
    leads_to = {rule.cause: rule.leads_to for rule in rules}

    def reached(cause: str) -> set[str]:
        seen: set[str] = set()
        new = set(leads_to[cause])
        while new:
            seen |= new
            new = set(chain.from_iterable(leads_to.get(each, ()) for each in new)) - seen
        return seen

    return [cause for cause in leads_to if cause in reached(cause)]
