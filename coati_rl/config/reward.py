"""Choose what scores responses, and its limits. `reward_spec` says what a scoring process gets to know."""

from typing import Annotated

from pydantic import AfterValidator

from coati_rl.config.fields import OptionalRange, Section, execution, experiment, function_or
from coati_rl.errors import ConfigError
from coati_rl.reward_spec import (
    BINARY_REWARDS,
    LONG_TIMEOUT_S,
    MATH_REWARDS,
    NO_REWARD,
    TIMEOUT_S,
    MathAnswer,
    RewardPart,
    RewardSpec,
    absolute_reward_type,
    default_timeout_s,
    is_model,
    model_directory,
    parse_reward_type,
    short_names,
)

RewardType = Annotated[str, AfterValidator(absolute_reward_type)]
OwnFunction = Annotated[str | None, function_or()]


class RewardConfig(Section):
    """Rewards, the processes that compute them, and the limits of programs that a model wrote."""

    reward_type: RewardType = experiment(
        "think_answer_tags",
        "Reward: think_answer_tags, boxed, code, reasoning_gym (the default for its rows), FILE.py:FUNCTION of your "
        "own, model:DIRECTORY, or http://... of a served model; several with weights: boxed=1,brevity.py:score=0.2. "
        "none: no reward, for --distill-only.",
        short="-rt",
    )
    reward_combine: OwnFunction = experiment(
        None,
        "FILE.py:FUNCTION that makes one reward of several: called with a dictionary of them by name; default: the "
        "weighted sum.",
    )
    reward_normalize: bool = experiment(
        False, "Bring the rewards of a mini-batch, of each task, to mean 0 and deviation 1 before advantages."
    )
    reward_clip: OptionalRange = experiment(
        None,
        "Clip rewards (normalised ones, if they are) to this range before advantages; None: off.",
        metavar="LOW,HIGH",
    )
    reward_devices: int = execution(
        1, "GPUs for each reward model of -rt model:DIRECTORY, a copy on each; 0: one copy on the CPU.", ge=0
    )
    code_verifier_api_url: str | None = execution(
        None,
        "Score code at this service (python -m rewards serve) instead of here; its token is in COATI_REWARD_TOKEN.",
        short="-cv",
    )
    reward_workers: int = execution(1, "Scoring processes of each producer.", ge=1)
    reward_timeout_s: float | None = experiment(
        None,
        f"Time for one response, seconds (CPU time for math; g times as long for a group that is scored in one call); "
        f"past it a sample is invalid. Default: {TIMEOUT_S:g} for math, else {LONG_TIMEOUT_S:g}.",
        gt=0,
    )
    math_answer: MathAnswer = experiment(
        "number",
        "math: where the ground truth is a number, the answer must be one (fractions, percent, units), or may be any "
        "formula of its value, as 27 + 45 for 72.",
        only_for="math",
    )
    correct_from: float = experiment(
        1.0, "A function or model that returns only a reward: the reward from which a response counts as correct."
    )
    test_timeout_s: float = experiment(
        10.0, "code: CPU time that a program may take for one test, seconds.", only_for="code", gt=0
    )
    test_memory_mb: int = experiment(1024, "code: memory that a program may take, MiB.", only_for="code", ge=32)
    run_model_code_without_sandbox: bool = execution(
        False,
        "code: run what the model writes with your own rights: it can read and change your files, keys, network.",
        only_for="code",
    )

    @property
    def models(self) -> tuple[str, ...]:
        """The directories of the reward models, in order."""
        return tuple(str(model_directory(part.name)) for part in self._parts() if is_model(part.name))

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the rewards, by the names that they have in a breakdown."""
        parts = self._parts()
        return {name: part.weight for name, part in zip(short_names(parts), parts, strict=True)}

    @property
    def scores_code(self) -> bool:
        """True if programs of the model are run."""
        return any(part.name == "code" for part in self._parts())

    @property
    def scores_math(self) -> bool:
        """True if answers are compared with a ground truth."""
        return any(part.name in MATH_REWARDS for part in self._parts())

    @property
    def has_binary_score(self) -> bool:
        """True if the first reward, which says what is right, is 1 or 0 for every response."""
        return any(part.name in BINARY_REWARDS for part in self._parts()[:1])

    @property
    def threshold(self) -> float | None:
        """The reward from which a response is correct, where one graded reward decides; None for any other reward."""
        names = [part.name for part in self._parts()]
        return self.correct_from if len(names) == 1 and names[0] not in (*BINARY_REWARDS, NO_REWARD) else None

    @property
    def response_timeout_s(self) -> float:
        """Time for one response."""
        return default_timeout_s(self._parts()) if self.reward_timeout_s is None else self.reward_timeout_s

    def _parts(self) -> tuple[RewardPart, ...]:
        """The rewards; none for a reward type that is refused."""
        try:
            return parse_reward_type(self.reward_type)
        except ConfigError:
            return ()


def reward_spec(config: RewardConfig) -> RewardSpec:
    """Return what a scoring process is made from."""
    return RewardSpec(
        reward_type=config.reward_type,
        timeout_s=config.response_timeout_s,
        math_answer=config.math_answer,
        combine=config.reward_combine,
        correct_from=config.correct_from,
        test_timeout_s=config.test_timeout_s,
        test_memory_mb=config.test_memory_mb,
        is_sandboxed=not config.run_model_code_without_sandbox,
    )
