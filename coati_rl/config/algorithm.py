"""What is optimised: reward, advantage, loss and optimizer."""

from typing import Literal

from pydantic import BaseModel

from coati_rl.config.fields import flag


class AlgorithmConfig(BaseModel):
    """GRPO's settings (arXiv:2402.03300)."""

    algo: str = flag("GRPO", "Algorithm.", short="-a")
    learning_rate: float = flag(1e-6, "Peak of the cosine schedule, which ends at a tenth of it.", short="-lr", gt=0)
    kl_coeff: float = flag(0.01, "Weight of KL to the start model; 0 loads no reference model.", short="-kl", ge=0)
    reward_type: str = flag("think_answer_tags", "Reward: think_answer_tags or boxed.", short="-rt")
    code_verifier_api_url: str | None = flag(None, "Service that verifies code answers.", short="-cv")
    loss_variation: Literal["sample_level", "token_level"] = flag(
        "sample_level", "Weigh each sample alike (GRPO) or each token (DAPO)."
    )
    clip_eps_low: float = flag(0.2, "The ratio is clipped at 1 - this.", ge=0, lt=1)
    clip_eps_high: float = flag(0.2, "The ratio is clipped at 1 + this.", ge=0)
    weight_decay: float = flag(0.01, "AdamW's weight decay.", ge=0)
    max_grad_norm: float = flag(1.0, "Gradients are clipped to this global norm.", gt=0)
