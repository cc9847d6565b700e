"""speculators 0.9.0 as an outside witness for DSpark training: its corrected logits and its confidence.

    PYTHON tests/helpers/witness_dspark.py OUT.safetensors     with the Python of an environment that has speculators

`tests/golden/dspark_witness.safetensors` was written by exactly this. It holds what `witness_dflash.py` writes, with
the logits corrected by the tokens of the text, without the teachers, and with the logits of the confidence head,
confidence [M, R].
"""

import sys
import tempfile
from pathlib import Path

import speculators.models.dspark.core as dspark
import torch
import witness_dflash
from safetensors.torch import save_file
from speculators.models.dspark import DSparkDraftModel
from torch import Tensor
from witness_dflash import BLOCK, DRAFT_VOCAB, LENGTH, build_drafter, build_target, packed, positions_of, stored

RANK = 6


def witness(drafter: DSparkDraftModel, case: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what the loss is computed from in a forward pass of training."""
    anchors, seen = case["anchors"], {}
    witness_dflash.core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))

    def compute_metrics(logits: Tensor, targets: Tensor, confidence: Tensor, *_: object, **__: object) -> tuple:
        seen.update(logits=logits, confidence=confidence)
        return torch.zeros(()), {}

    dspark.compute_metrics = compute_metrics
    with torch.no_grad():
        drafter(
            case["features"],
            case["tokens"],
            case["loss_mask"],
            case["last_hidden"],
            case["documents"],
            positions_of(case["documents"]),
            max_anchors=len(anchors),
        )
    return {name: tensor[0].unflatten(0, (-1, BLOCK)) for name, tensor in seen.items()}


def main(out: Path) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        target = build_target(Path(folder))
        drafter = build_drafter(Path(folder), DSparkDraftModel, markov_rank=RANK)
    assert drafter.markov_head.markov_w2.weight.shape == (DRAFT_VOCAB, RANK)
    drafter.markov_head.markov_w1.weight.data *= 20  # beyond the factor of all weights: the token before is felt
    tensors = stored(drafter, target)
    for lengths in ([LENGTH], [9, 7, LENGTH - 16]):
        case = packed(lengths)
        case |= witness(drafter, case)
        tensors |= {f"{len(lengths)}.{name}": tensor for name, tensor in case.items() if name != "last_hidden"}
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
