"""Set what is optimised: advantage, loss, filters. --algo names a preset that sets the parts; flags override.

The parts are orthogonal: docs/algorithms.md has the formula of each, `coati_rl.config.algorithm_rules` says which
combinations contradict themselves.
"""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import field_validator, model_validator

from coati_rl.algorithms.advantage import ADVANTAGE_ESTIMATORS, GAE, GDPO, needs_baseline
from coati_rl.algorithms.aggregation import LossVariation
from coati_rl.algorithms.choices import POLICY_LOSSES, Correction, KLEstimator, RatioLevel, TokenSelection
from coati_rl.config.fields import OptionalRange, Range, Section, execution, experiment, function_or
from coati_rl.config.model import RouterReplay, aux_loss_coeff
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.config.presets import PRESETS, fill_in
from coati_rl.plugins import absolute
from coati_rl.types import MAX_REWARD

KLPlace = Literal["none", "loss", "reward"]
OldLogprobs = Literal["auto", "engine", "trainer"]

part = partial(experiment, follows=("algo",))  # what makes the algorithm: --algo chooses it


class AlgorithmConfig(Section):
    """Advantage, loss, KL, filters; the defaults are those of --algo GRPO."""

    algo: str = experiment(
        "GRPO", "Preset of all settings below that it names; or a FILE.yaml of your own.", short="-a"
    )

    advantage_estimator: Annotated[str, function_or(*ADVANTAGE_ESTIMATORS, GDPO, GAE)] = part(
        "group_norm",
        f"From a group's rewards to advantages: {', '.join(ADVANTAGE_ESTIMATORS)}, {GDPO} (each reward of -rt by "
        f"itself), {GAE} (of a critic, by token), or FILE.py:FUNCTION.",
    )
    turn_advantages: float | None = part(
        None,
        "An advantage for each turn of an episode: the turn's reward plus this times the return of the next; None: one "
        "for the episode.",
        metavar="GAMMA",
        ge=0,
        le=1,
    )
    whiten_advantages: bool = part(False, "Bring advantages to mean 0 and deviation 1 over all tokens of a step.")
    policy_loss: Annotated[str, function_or(*POLICY_LOSSES)] = part(
        "clip", f"Token term of the loss: {', '.join(POLICY_LOSSES)}, or FILE.py:FUNCTION."
    )
    ratio_level: RatioLevel = part("token", "Importance ratio of each token, or of the whole response (GSPO).")
    clip_eps_low: float = part(0.2, "The ratio is clipped at 1 - this; 1: no lower bound.", ge=0, le=1)
    clip_eps_high: float = part(0.2, "The ratio is clipped at 1 + this.", ge=0)
    clip_dual: float | None = part(
        None, "Dual clip: at negative advantage no term exceeds this times it.", gt=1, needs={"policy_loss": ("clip",)}
    )
    sapo_temperature_pos: float = part(
        1.0,
        "Width of sapo's gate where the advantage is above 0: larger is narrower.",
        gt=0,
        needs={"policy_loss": ("sapo",)},
    )
    sapo_temperature_neg: float = part(1.05, "The same at other advantages.", gt=0, needs={"policy_loss": ("sapo",)})
    vespo_positive: Range = part(
        (2.0, 3.0),
        "Shape of vespo's weight where the advantage is not negative.",
        metavar="K,LAMBDA",
        needs={"policy_loss": ("vespo",)},
    )
    vespo_negative: Range = part(
        (3.0, 2.0), "The same at negative advantages.", metavar="K,LAMBDA", needs={"policy_loss": ("vespo",)}
    )
    token_selection: TokenSelection = part(
        "all",
        "Tokens of a step whose policy term differs: those of the highest entropy alone have one (top_entropy), or a "
        "few of high covariance of advantage and log-probability have none (clip_cov), or are held (kl_cov).",
    )
    token_fraction: float | None = part(
        None,
        "Share of a step's tokens that --token-selection chooses; default: its paper's.",
        gt=0,
        le=1,
        needs={"token_selection": ("top_entropy", "clip_cov", "kl_cov")},
    )
    token_covariance: Range = part(
        (1.0, 5.0),
        "clip_cov chooses among tokens with a covariance in this range.",
        metavar="LOW,HIGH",
        needs={"token_selection": ("clip_cov",)},
    )
    kl_cov_coeff: float = part(
        1.0, "Weight of |log ratio| on the tokens that kl_cov holds.", gt=0, needs={"token_selection": ("kl_cov",)}
    )
    updates_per_batch: int = part(
        1,
        "Optimizer steps on each batch (N): all batches of a rollout step once, then N - 1 times more, with "
        "old_logprobs of before the first (PPO epochs).",
        ge=1,
    )
    loss_variation: LossVariation = part(
        "sample_level", "Weigh each sample alike (GRPO), each token (DAPO), or by a constant length (Dr. GRPO)."
    )
    entropy_coeff: float = part(0.0, "Weight of the entropy bonus.", ge=0)
    aux_loss_coeff: float = aux_loss_coeff()
    router_replay: RouterReplay = experiment(
        "none",
        "What trainers do with the experts of a mixture that engines chose for each token: nothing, measure how many "
        "differ from their own choice, or compute with them (R3, rollout routing replay).",
    )

    kl_coeff: float = part(0.01, "Weight of KL to the start model; 0 loads no reference model.", short="-kl", ge=0)
    kl_place: KLPlace = experiment(
        "loss", "Where KL acts: on the loss, or on the reward of each token.", follows=("algo", "kl_coeff")
    )
    kl_estimator: KLEstimator = part("k3", "How KL is estimated from the sampled token.")
    kl_clamp: float | None = part(
        None,
        "Bound of a token's KL estimate, nats, without gradient beyond (10 in verl and OpenRLHF); None: off.",
        gt=0,
        needs={"kl_coeff": ()},
    )

    kl_bias_correction: bool = part(
        False,
        "Weigh KL in the loss by the ratio, whose gradient counts: unbiased also off-policy.",
        needs={"kl_place": ("loss",)},
    )

    old_logprobs: OldLogprobs = experiment(
        "auto", "Where old_logprobs come from: engine, or trainer (recomputed, where auto finds that they must be)."
    )
    off_policy_correction: Correction = part(
        "none",
        "Weight against the difference of trainer and engine: truncated (tis), of whole samples (sequence_tis), band "
        "(icepop), whole samples (sequence_mask), and these with their tokens' ratios (sequence_mask_tis).",
    )
    off_policy_low: float | None = experiment(
        None,
        "Lower bound of pi_old / pi_engine; default: the correction's.",
        follows=("algo", "off_policy_correction"),
        ge=0,
        needs={"off_policy_correction": ()},
    )
    off_policy_high: float | None = experiment(
        None,
        "Upper bound of pi_old / pi_engine; default: the correction's.",
        follows=("algo", "off_policy_correction"),
        gt=0,
        needs={"off_policy_correction": ()},
    )
    off_policy_mask_threshold: float | None = part(
        None,
        "A sample with negative advantage and a mean of log pi_engine - log pi above this, in nats, has no policy term "
        "(OPSM); None: off.",
        gt=0,
    )
    skip_threshold: float | None = part(
        20.0, "A sample with a ratio above this is left out of the loss and counted; None: off.", gt=1, le=1e8
    )

    filter_range: OptionalRange = part(
        None, "Groups whose mean score (0 to 1) is not strictly inside are not trained; None: off.", metavar="LOW,HIGH"
    )
    dynamic_batching: bool = part(False, "Replace groups that are not trained, so that each step has tbs * dp others.")
    max_empty_batches: int = execution(10, "Stop when so many steps' worth of groups in a row are not trained.", ge=1)
    soft_over_length_punishment: bool = part(False, "Take off reward from responses near the length limit (DAPO).")
    cache_length: int | None = part(
        None,
        "Tokens before the limit where that begins; default: min(1024, mnt / 4).",
        ge=1,
        needs={"soft_over_length_punishment": ()},
    )
    reward_scale: float = experiment(
        1.0, "Largest reward of a right answer: what the full punishment takes off.", gt=0, le=MAX_REWARD
    )
    filter_truncated_response: bool = part(False, "Leave responses that hit the limit out of the loss.")

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.advantage_estimator == GAE

    @property
    def has_baseline(self) -> bool:
        """Whether each training prompt gets a greedy answer, with which its samples are compared."""
        return needs_baseline(self.advantage_estimator)

    @model_validator(mode="before")
    @classmethod
    def _take_the_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        filled = fill_in(values, PRESET_FIELDS)
        return {name: value for name, value in filled.items() if name in values or name in AlgorithmConfig.model_fields}

    @field_validator("algo")
    @classmethod
    def _preset_is_upper_case(cls, name: str) -> str:
        return name.upper() if name.upper() in PRESETS else str(absolute(name))


PRESET_FIELDS = (*AlgorithmConfig.model_fields, *OptimizerConfig.model_fields)  # what --algo FILE.yaml may set
