"""Start SGLang's server on the CPU: its launcher, with the arguments of this script.

Before it, the names of two operators are declared that torchvision, whose wheel is built for CUDA, asks torch for when
it is imported; nobody calls them. Nothing of SGLang is replaced. Its processes import this script again.
"""

import sys

import torch

for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
