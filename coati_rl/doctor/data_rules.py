"""Tell by templates, rows and losses on held-out data whether a run is given the right data."""

from coati_rl.doctor.rule import POOR, WRONG, Rules
from coati_rl.doctor.run_data import RunData
from coati_rl.doctor.source_files import markers_of

_POOR_ACCURACY, _UNFORMATTED = 0.1, 0.5
_SHARED = 0.02  # of an evaluation set's rows
_EQUAL_PAIRS = 0.1
_AT_LIMIT = 0.9  # of --max-length, mean over rows
_OVERFIT, _BY_HEART = 1.03, 0.5  # times the best loss on held-out rows; training's over the held-out one
_NO_LOSS = 0.01  # share of tokens
RULES = Rules()


@RULES.add(
    WRONG,
    says="the prompts are written in a form that the model does not know",
    remedy="leave out --chat-template and --input-template, or give the template that the model was trained with; "
    "--dry-run shows the first prompt",
    leads_to="truncation reward_never_right answer_format groups_equal nothing_in_loss repetition "
    "temperature_too_high reward_falls length_growth length_collapse kl_explosion",
)
def wrong_template(run: RunData) -> str | None:
    """Compare the chat template with the model's own, where responses are bad from the first steps on.

    Bad is: an accuracy below 0.1, or half of the responses without a valid format. The template is another one if
    --chat-template or --input-template replaces the model's, or it writes special tokens that the vocabulary lacks.
    """
    used = run.config.get("chat_template") or run.sources.own_template
    if not run.is_rl or not _is_bad(run):
        return None
    if run.sources.own_template is not None:
        if run.config.get("input_template") is not None:
            return (
                f"--input-template {run.config['input_template']!r} replaces the model's chat template, {_signs(run)}"
            )
        if used != run.sources.own_template:
            return f"--chat-template is not the model's own, {_signs(run)}"
    known = run.sources.vocabulary_markers
    missing = sorted(markers_of(used or "") - known) if known is not None else []
    if missing:
        return (
            f"the chat template writes {', '.join(missing[:4])}, which the vocabulary has not as tokens, {_signs(run)}"
        )
    return None


def _is_bad(run: RunData) -> bool:
    accuracy, valid = run.early("answer_accuracy"), run.early("format_accuracy")
    return (accuracy is not None and accuracy < _POOR_ACCURACY) or (valid is not None and valid < _UNFORMATTED)


def _signs(run: RunData) -> str:
    values = (
        f"{name} {value:.2g}"
        for name, key in (
            ("accuracy", "answer_accuracy"),
            ("valid format", "format_accuracy"),
            ("cut", "truncated_fraction"),
        )
        if (value := run.early(key)) is not None
    )
    return f"and the first steps have {', '.join(values)}"


@RULES.add(
    WRONG,
    says="evaluation rows are trained on: the evaluation says nothing",
    remedy="remove them from --dataset, or evaluate on other rows",
)
def evaluation_overlap(run: RunData) -> str | None:
    """Count rows of evaluation files that are in the training file, byte for byte: more than 2 % of a set, and two."""
    shared = {
        name: counts
        for name, counts in (run.sources.shared_rows or {}).items()
        if counts[0] >= 2 and counts[0] > _SHARED * counts[1]
    }
    if not shared:
        return None
    return "; ".join(
        f"{same} of {number} rows of evaluation set {name} are training rows" for name, (same, number) in shared.items()
    )


@RULES.add(
    WRONG,
    says="most rows are cut, and their ends are not trained",
    remedy="raise --max-length",
    leads_to="pairs_equal no_loss_tokens",
)
def rows_cut(run: RunData) -> str | None:
    """Compare the mean length of a job's samples with --max-length: above 0.9 times it most rows are cut at the end."""
    limit, samples = run.config.get("max_length"), sum(value for _, value in run.values("num_samples"))
    tokens = sum(value for _, value in run.values("num_tokens"))
    if run.is_rl or not limit or not samples or tokens < _AT_LIMIT * limit * samples:
        return None
    return f"samples have {tokens / samples:.1f} tokens on average, and are cut at --max-length {limit}"


@RULES.add(
    WRONG,
    says="pairs teach nothing, because their completions are equal",
    remedy="remove such pairs, check --chosen-key and --rejected-key, or raise --max-length",
)
def pairs_equal(run: RunData) -> str | None:
    """Count pairs whose two completions have the same tokens once they are cut: a tenth, over all steps."""
    equal, pairs = (sum(value for _, value in run.values(key)) for key in ("pairs_equal", "pairs"))
    if not pairs or equal < _EQUAL_PAIRS * pairs:
        return None
    return f"{equal:.0f} of {pairs:.0f} pairs have equal completions with --max-length {run.config.get('max_length')}"


@RULES.add(
    POOR,
    says="nearly all tokens are left out of the loss",
    remedy="check --loss-on and the roles of messages, and --max-length",
)
def no_loss_tokens(run: RunData) -> str | None:
    """Look whether below 1 % of the tokens of a job on a dataset are in the loss."""
    loss, tokens = (sum(value for _, value in run.values(key)) for key in ("loss_tokens", "num_tokens"))
    if run.is_rl or "loss_on" not in run.config or not tokens or loss >= _NO_LOSS * tokens:
        return None
    return f"{loss:.0f} of {tokens:.0f} tokens are in the loss with --loss-on {run.config.get('loss_on')}"


@RULES.add(
    POOR,
    says="the model learns its rows by heart: held-out rows get worse",
    remedy="fewer --max-epochs, more rows, a lower --learning-rate; --keep-best eval/NAME/loss keeps the best",
)
def overfitting(run: RunData) -> str | None:
    """Follow the loss on held-out rows: it is 3 % above its best, after it, and that of training fell below half of it.

    Held-out rows are the same in each evaluation, so that 3 % is no noise of sampling.
    """
    early, late = run.early("loss"), run.late("loss")
    by_set: dict[str, list[tuple[int, float]]] = {}
    for each in run.evaluations:
        if not run.is_rl and isinstance(each.get("loss"), int | float):
            by_set.setdefault(str(each.get("task")), []).append((each["step"], each["loss"]))
    for name, losses in by_set.items():
        best_step, best = min(losses, key=lambda each: each[1])
        step, last = losses[-1]
        if len(losses) < 3 or step <= best_step or not early or not late:
            continue
        if last > _OVERFIT * best and late < min(early, _BY_HEART * last):
            return (
                f"the loss on {name} was {best:.3g} at step {best_step} and is {last:.3g} at step {step}; that of "
                f"training fell from {early:.3g} to {late:.3g}"
            )
    return None
