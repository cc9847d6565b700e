"""The weights of a block's depths in the loss, where a token only counts if all before it were accepted.

Shapes: K depths, R rows, H hidden width, Vd draft vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.models.losses.chain_loss import chunk_rows

D_PACE_FLOOR = 0.5  # alpha of the paper, to which 0.3 to 0.7 were alike


def d_pace(chances: Tensor, counted: Tensor) -> Tensor:
    """Return D-PACE's weights (arXiv 2605.18810): how many accepted tokens hang on each depth of each block.

    `chances` [..., K] are the drafter's chances of the text's own tokens. `counted`, bool [..., K], marks the depths
    that are trained, from the first one on up to some depth; the others weigh 0 and change nothing. A draft reaches
    beyond depth i with the product of the chances up to it, each raised to (1 - a) q + a. The weight of a depth is the
    sum of these products from it on. Weights are fp32 [..., K] and have no gradient.
    """
    raised = (D_PACE_FLOOR + (1 - D_PACE_FLOOR) * chances.float()).masked_fill(~counted, 0)
    return raised.cumprod(-1).flip(-1).cumsum(-1).flip(-1).detach()


@torch.no_grad()
def chances_of(token_ids: Tensor, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the chances [R] fp32 that a drafter gives to tokens [R], from hidden states [R, H].

    Tokens are draft ids; a negative one cannot be drafted and has no chance. Logits exist for some rows at a time.
    """
    step = chunk_rows(head(hidden[:1]).shape[-1])
    chances = []
    for tokens, rows in zip(token_ids.split(step), hidden.split(step), strict=True):
        logits = head(rows).float()  # [R, Vd]
        log_q = logits.gather(1, tokens.clamp(min=0)[:, None])[:, 0] - logits.logsumexp(-1)
        chances.append(log_q.exp().masked_fill(tokens < 0, 0))
    return torch.cat(chances)
