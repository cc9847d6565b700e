"""Text that the drafter writes itself while it is trained (on-policy distillation, arXiv 2306.13649).

A standalone draft model goes on from its own tokens when it drafts. Trained on the target's text alone it never sees
its own mistakes; here it answers the prompts of a batch itself and is compared with the target on what it wrote.
"""

import torch

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.decoder import resolve_settings
from draftsmith.models import Drafter, load_drafter
from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.train.config import DataConfig


class OnPolicy:
    """Decides which steps train on the drafter's own text, and writes it."""

    def __init__(self, drafter: Drafter, config: DataConfig, num_steps: int, seed: int) -> None:
        """Raises `UserError` for drafters that write no text."""
        model = drafter.as_target()
        if model is None:
            raise UserError(f"data.on_policy_share: {drafter.kind} drafters write no text of their own; leave it at 0")
        self._decoder = SpeculativeDecoder(model, load_drafter("none", model))
        self._share, self._rise = config.on_policy_share, config.on_policy_rise * num_steps
        self._seed = seed

    def is_due(self, step: int) -> bool:
        """Whether a step trains on the drafter's text: alike on all ranks and in a resumed run."""
        share = self._share * min(1.0, (step + 1) / max(1.0, self._rise))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        return bool(torch.rand((), generator=generator) < share)

    def rewrite(self, batch: Batch, step: int) -> Batch:
        """The batch with the drafter's own answer in the place of each document's, as long or shorter."""
        answers = [answer for row in range(len(batch.token_ids)) for answer in answers_in(batch, row)]
        longest = max(end - start for _, _, start, end in answers)
        how = resolve_settings(self._decoder.drafter, Sampling(1.0), longest, seed=self._seed * 1_000_003 + step)
        prompts = [batch.token_ids[row, first:start].tolist() for row, first, start, _ in answers]
        written = self._decoder.decode(prompts, how).token_ids
        token_ids, loss_mask = batch.token_ids.clone(), torch.zeros_like(batch.loss_mask)
        for (row, _, start, end), tokens in zip(answers, written, strict=True):
            end = min(end, start + len(tokens))
            token_ids[row, start:end] = torch.tensor(tokens[: end - start], device=token_ids.device)
            loss_mask[row, start:end] = True
        return Batch(token_ids, loss_mask, batch.documents)


def answers_in(batch: Batch, row: int) -> list[tuple[int, int, int, int]]:
    """(row, first token of the document, first that the target wrote, end of what it wrote) of a row's documents."""
    mask = batch.loss_mask[row].cpu()
    documents = torch.zeros_like(batch.token_ids[row]) if batch.documents is None else batch.documents[row]
    found = []
    for document in documents[batch.loss_mask[row]].unique().tolist():
        inside = (documents == document).cpu()
        trained = (mask & inside).nonzero()[:, 0]
        found.append((row, int(inside.nonzero()[0]), int(trained[0]), int(trained[-1]) + 1))
    return found
