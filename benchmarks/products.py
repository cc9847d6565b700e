"""Products of few rows on a GPU: one kernel, separate launches around cuBLAS, and the time of reading the weights.

    python benchmarks/products.py

Products of a layer of Llama-3.1-8B and Qwen3-8B in bf16, with what stands around them: the norm before, the residual
or the gate behind. Figures are microseconds of a call, as decoding measures them at its warm-up to choose the faster
form; the floor is the time of a copy of as many bytes.
"""

import torch

from draftsmith.inference.measuring.bandwidth import memory_bandwidth
from draftsmith.inference.measuring.environment import git_commit
from draftsmith.models.fused import product_kernel
from draftsmith.models.fused.layer_kernels import CALLS, ProductKind, milliseconds, separate_product
from draftsmith.models.fused.layer_steps import Ending

ROWS = (1, 2, 5, 8)
PRODUCTS: dict[str, tuple[int, int, bool, Ending]] = {  # inputs, outputs, whether a norm is before it, its ending
    "q, k and v": (4096, 6144, True, "write"),
    "attention's output": (4096, 4096, False, "add"),
    "gate and up, Llama": (4096, 28672, True, "gate"),
    "down, Llama": (14336, 4096, False, "add"),
    "gate and up, Qwen3": (4096, 24576, True, "gate"),
    "down, Qwen3": (12288, 4096, False, "add"),
}


def main() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    bandwidth = memory_bandwidth(device)
    assert bandwidth is not None
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {git_commit()}, {bandwidth / 1e9:.0f} GB/s"
    )
    print(f"{'product':20} rows one kernel  separate     floor")
    for name, (width, outputs, normed, ending) in PRODUCTS.items():
        floor = 1e6 * 2 * width * outputs / bandwidth
        for num_rows in ROWS:
            kind = ProductKind(num_rows, width, outputs, torch.bfloat16, device, normed, False, ending)
            forms = (product_kernel.product, separate_product)
            fused, separate = (1000 * milliseconds(form, kind) / CALLS for form in forms)
            print(f"{name:20} {num_rows:4} {fused:10.1f} {separate:9.1f} {floor:9.1f}", flush=True)


if __name__ == "__main__":
    main()
