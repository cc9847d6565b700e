"""Cuts, noise and draws by kernels where a device has them, else by their plain form in `sampling`."""

from torch import Tensor

from draftsmith.models.kernels import runs_kernels
from draftsmith.models.sampling import sampling as plain
from draftsmith.models.sampling.sampling import Noise, Sampling, Stream


def cut(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return `sampling.cut` of logits [..., V]."""
    if not runs_kernels(logits.device):
        return plain.cut(logits, sampling)
    from draftsmith.models.sampling import cut_kernels  # needs triton

    return cut_kernels.cut(logits, sampling)


def draw(
    logits: Tensor, sampling: Sampling, noise: Noise, positions: Tensor, stream: Stream, branch: int, out: Tensor
) -> Tensor:
    """Do what `sampling.draw` does: write a token of each row of logits [B, V] to `out` [B], return the cut logits."""
    if not runs_kernels(logits.device):
        return plain.draw(logits, sampling, noise, positions, stream, branch, out)
    from draftsmith.models.sampling import cut_kernels  # needs triton

    return cut_kernels.draw(logits, sampling, noise, positions, stream, branch, out)


def uniforms(noise: Noise, positions: Tensor, stream: Stream, branch: Tensor | int = 0) -> Tensor:
    """Return `Noise.uniforms` of all rows, at positions [B, T]."""
    if not runs_kernels(positions.device):
        return noise.uniforms(positions, stream, branch)
    from draftsmith.models.sampling import sampling_kernels  # needs triton

    return sampling_kernels.uniforms(noise.keys, positions, stream, branch)
