"""Dense bf16 peak of NVIDIA GPUs by the name that the driver gives, in TFLOP/s: what MFU is a share of.

Every figure is NVIDIA's own, for matrix products with float32 accumulation; where NVIDIA states it with 2:4 sparsity
only, half of that. Names are matched as a whole: laptop and export variants are other chips, and a MIG slice is a part.
"""

import re

# (pattern of the whole name, TFLOP/s, source)
PEAKS = (
    (r"NVIDIA H100( \d+GB HBM3)?", 989.4, "NVIDIA H100 Tensor Core GPU Architecture whitepaper, H100 SXM5"),
    (r"NVIDIA H100 PCIe", 756.0, "NVIDIA H100 Tensor Core GPU Architecture whitepaper, H100 PCIe"),
    (r"NVIDIA H[12]00 NVL", 835.5, "NVIDIA H100 NVL and H200 NVL datasheets, half of 1,671 with sparsity"),
    (r"NVIDIA H200", 989.4, "NVIDIA H200 datasheet, half of 1,979 with sparsity: the H100 SXM's compute"),
    (r"NVIDIA GH200 \d+GB", 989.4, "NVIDIA GH200 datasheet, half of 1,979 with sparsity: the H100 SXM's compute"),
    (r"NVIDIA B200", 2250.0, "NVIDIA HGX B200 datasheet, half of 36,000 with sparsity, of eight GPUs"),
    (r"(NVIDIA )?A100[- ](SXM4|PCIE|PG509|\d+GB).*", 312.0, "NVIDIA A100 datasheet"),
    (r"NVIDIA A40", 149.7, "NVIDIA A40 datasheet"),
    (r"NVIDIA A10", 125.0, "NVIDIA A10 datasheet"),
    (r"NVIDIA L40S", 362.05, "NVIDIA L40S datasheet"),
    (r"NVIDIA L40", 181.05, "NVIDIA L40 datasheet"),
    (r"NVIDIA L4", 121.0, "NVIDIA L4 datasheet, half of 242 with sparsity"),
    (r"NVIDIA GeForce RTX 4090", 165.2, "NVIDIA Ada GPU Architecture whitepaper, appendix A"),
    (r"NVIDIA GeForce RTX 3090", 71.0, "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A"),
)


def dense_bf16_peak(gpu_name: str) -> tuple[float, str] | None:
    """(TFLOP/s, source) of a GPU, None for one that is not in the table."""
    if "MIG" in gpu_name:
        return None
    return next(((peak, source) for pattern, peak, source in PEAKS if re.fullmatch(pattern, gpu_name)), None)
