"""GPUs by their makers' data sheets: what a prediction of speed needs to know of one.

The link is NVLink or Infinity Fabric where a card has one that joins all of a machine, else PCIe of 16 lanes.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from draftsmith.models.errors import UserError

NVIDIA, GEFORCE, AMD = "https://www.nvidia.com/en-us/", "https://images.nvidia.com/aem-dam/", "https://www.amd.com/en/"
INSTINCT = f"{AMD}products/accelerators/instinct/"

Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Gpu:
    """A GPU. Operations are dense, as tensor cores do them with sums in fp32, and without structured sparsity."""

    name: str
    bandwidth: Amount  # bytes a second from its memory
    memory: Amount  # bytes
    bf16: Amount  # operations a second
    fp8: Amount | None  # None: it cannot multiply such numbers
    fp4: Amount | None
    link: Amount  # bytes a second that it gets from the other GPUs of its machine
    source: str


def _gpu(
    name: str,
    bandwidth: float,
    memory: float,
    bf16: float,
    fp8: float | None,
    fp4: float | None,
    link: float,
    source: str,
) -> Gpu:
    """Return a GPU from the units of data sheets: TB/s, GB, TFLOP/s, and GB/s of its link in one direction."""
    in_fp8, in_fp4 = (None if tera is None else 1e12 * tera for tera in (fp8, fp4))
    return Gpu(name, 1e12 * bandwidth, 1e9 * memory, 1e12 * bf16, in_fp8, in_fp4, 1e9 * link, source)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("B200", 8.0, 180, 2250, 4500, 9000, 900, f"{NVIDIA}data-center/hgx/"),
        _gpu("H200", 4.8, 141, 989, 1979, None, 450, f"{NVIDIA}data-center/h200/"),
        _gpu("H100", 3.35, 80, 989, 1979, None, 450, f"{NVIDIA}data-center/h100/"),
        _gpu("GH200", 4.0, 96, 989, 1979, None, 450, f"{NVIDIA}data-center/grace-hopper-superchip/"),
        _gpu("H20", 4.0, 96, 148, 296, None, 450, f"{NVIDIA}data-center/hgx/"),
        _gpu("H100-PCIe", 2.0, 80, 756, 1513, None, 64, f"{NVIDIA}data-center/h100/"),
        _gpu("A100-80GB", 2.039, 80, 312, None, None, 300, f"{NVIDIA}data-center/a100/"),
        _gpu("A100-40GB", 1.555, 40, 312, None, None, 300, f"{NVIDIA}data-center/a100/"),
        _gpu("L40S", 0.864, 48, 362, 733, None, 32, f"{NVIDIA}data-center/l40s/"),
        _gpu("L4", 0.3, 24, 121, 242, None, 32, f"{NVIDIA}data-center/l4/"),
        _gpu("A40", 0.696, 48, 149.7, None, None, 32, f"{NVIDIA}data-center/a40/"),
        _gpu("A10", 0.6, 24, 125, None, None, 32, f"{NVIDIA}data-center/products/a10-gpu/"),
        _gpu(
            "RTX-PRO-6000", 1.792, 96, 504, 1007, 2015, 64, f"{NVIDIA}products/workstations/professional-desktop-gpus/"
        ),
        _gpu(
            "RTX-5090",
            1.792,
            32,
            209.5,
            419,
            1676,
            64,
            f"{GEFORCE}Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
        ),
        _gpu(
            "RTX-4090",
            1.008,
            24,
            165.2,
            330.3,
            None,
            32,
            f"{GEFORCE}Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
        ),
        _gpu(
            "RTX-3090",
            0.936,
            24,
            71,
            None,
            None,
            32,
            f"{GEFORCE}en-zz/Solutions/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf",
        ),
        _gpu("MI300X", 5.3, 192, 1307, 2615, None, 448, f"{INSTINCT}mi300/mi300x.html"),
        _gpu("MI325X", 6.0, 256, 1307, 2615, None, 448, f"{INSTINCT}mi300/mi325x.html"),
        _gpu("MI355X", 8.0, 288, 2517, 5033, 10066, 537.6, f"{INSTINCT}mi350/mi355x.html"),
    )
}


def gpu_named(name: str) -> Gpu:
    """Return a GPU by its name, in small or large letters. Raises `UserError` naming those that are known."""
    for gpu in GPUS.values():
        if gpu.name.lower() == name.lower().replace(" ", "-"):
            return gpu
    raise UserError(f"--gpu {name}: no data sheet of it is known: give one of {', '.join(GPUS)}")


def gpu_of_device(device_name: str) -> Gpu | None:
    """Return the GPU whose name's words all stand in a driver's name of a device; None where there is no such GPU.

    Of several it is the one with the most words.
    """
    words = set(device_name.lower().replace("-", " ").split())
    matching = [gpu for name, gpu in GPUS.items() if set(name.lower().split("-")) <= words]
    return max(matching, key=lambda gpu: len(gpu.name.split("-")), default=None)
