"""List the trainers whose life cycle is tested, and the layouts that resume from their checkpoints."""

from tests.integration.consumer.lifecycle_process import Case, Resume

MODELS = {"tied": "qwen3", "untied": "qwen2"}
KINDS = [
    ("tp2_pp2", "fp32"),
    ("tp2", "fp32"),
    ("tp2_zero1_dp2", "bf16"),
    ("dp2", "fp32"),
    ("dp2", "bf16"),
    ("pp2", "fp32"),
    ("zero2_dp2", "bf16"),
    ("dp1", "fp32"),
    ("fsdp2_dp2", "fp32"),
    ("fsdp2_dp2", "bf16"),
    ("fsdp2_dp3", "fp32"),
    ("cp2_dp2", "fp32"),
    ("cp2_tp2", "fp32"),
    ("cp2_pp2", "bf16"),
    ("cp2_zero2_dp2", "bf16"),
    ("cp2_fsdp2", "fp32"),
    ("fsdp2_tp2", "fp32"),
    ("fsdp2_tp2_dp2", "fp32"),
    ("fsdp2_tp2_dp2", "bf16"),
    ("fsdp2_tp2_copies2", "fp32"),
    ("fsdp2_dp2_copies2", "fp32"),
]
CASES = [Case(*kind, model) for kind in KINDS for model in MODELS]
FAST_CASES = {
    Case("tp2", "fp32", "tied"),
    Case("pp2", "fp32", "untied"),
    Case("zero2_dp2", "bf16", "tied"),
    Case("dp1", "fp32", "untied"),
    Case("fsdp2_dp2", "bf16", "untied"),
}
RESUMES = [
    Resume(*kind, model, *source)
    for source, kinds in {
        ("tp2_pp2", "fp32"): [
            ("dp1", "fp32"),
            ("dp2", "fp32"),
            ("tp2", "fp32"),
            ("tp2_zero1_dp2", "bf16"),
            ("fsdp2_dp2", "fp32"),
        ],
        ("tp2", "fp32"): [("dp1", "fp32"), ("pp2", "fp32")],
        ("tp2_zero1_dp2", "bf16"): [("tp2_pp2", "bf16")],
        ("zero2_dp2", "bf16"): [("fsdp2_dp2", "bf16")],
        ("fsdp2_dp2", "fp32"): [("tp2", "fp32")],
        ("fsdp2_dp2", "bf16"): [("zero2_dp2", "bf16")],
        ("cp2_dp2", "fp32"): [("dp1", "fp32"), ("cp2_fsdp2", "fp32")],
        ("cp2_fsdp2", "fp32"): [("tp2", "fp32"), ("cp2", "fp32")],
        ("fsdp2_tp2_dp2", "fp32"): [("dp1", "fp32"), ("fsdp2_dp2_copies2", "fp32"), ("tp2_pp2", "fp32")],
        ("fsdp2_dp2_copies2", "fp32"): [("fsdp2_tp2", "fp32"), ("fsdp2_tp2_copies2", "fp32"), ("dp2", "fp32")],
    }.items()
    for kind in kinds
    for model in MODELS
]


# Of the resumes those in bfloat16 from one way of sharding to the other are alike.
SLOW = ("fsdp2_dp2", "zero2_dp2")


def is_fast(task: Case | Resume) -> bool:
    if isinstance(task, Resume) and (task.layout, task.from_layout) == SLOW:
        return False
    source = task if isinstance(task, Case) else Case(task.from_layout, task.from_precision, task.model)
    return source in FAST_CASES
