"""Apply all rules to a run, and rank what they find: the most probable root cause first."""

from collections.abc import Sequence

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
