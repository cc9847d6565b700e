"""Training on text that the drafter itself writes (on-policy distillation, arXiv 2306.13649).

A drafter that goes on from its own tokens never sees its own mistakes when it is trained on the target's text alone.
Here it answers the prompts of a batch itself, and is compared with the target on its answers.
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
        """Raise `UserError` for drafters that write no text."""
        model = drafter.as_target()
        if model is None:
            raise UserError(f"data.on_policy_share: {drafter.kind} drafters write no text of their own; leave it at 0")
        self._decoder = SpeculativeDecoder(model, load_drafter("none", model))
        self._share, self._rise = config.on_policy_share, config.on_policy_rise * num_steps
        self._seed = seed

    def is_due(self, step: int) -> bool:
        """Return whether a step trains on the drafter's text, alike on all ranks and in a resumed run."""
        share = self._share * min(1.0, (step + 1) / max(1.0, self._rise))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        return bool(torch.rand((), generator=generator) < share)

    def rewrite(self, batch: Batch, step: int) -> Batch:
        """Return the batch with the drafter's own answers in place of the documents' answers, as long or shorter."""
        answers = [answer for row in range(len(batch.token_ids)) for answer in answers_in(batch, row)]
        longest = max(end - start for _, _, start, end in answers)
        settings = resolve_settings(self._decoder.drafter, Sampling(1.0), longest, seed=self._seed * 1_000_003 + step)
        prompts = [batch.token_ids[row, first:start].tolist() for row, first, start, _ in answers]
        written = self._decoder.decode(prompts, settings).token_ids
        token_ids, loss_mask = batch.token_ids.clone(), torch.zeros_like(batch.loss_mask)
        for (row, _, start, end), tokens in zip(answers, written, strict=True):
            end = min(end, start + len(tokens))
            token_ids[row, start:end] = torch.tensor(tokens[: end - start], device=token_ids.device)
            loss_mask[row, start:end] = True
        return Batch(token_ids, loss_mask, batch.documents)


def answers_in(batch: Batch, row: int) -> list[tuple[int, int, int, int]]:
    """Return for each document of a row: row, its first token, the first that the target wrote, the end of those."""
    mask = batch.loss_mask[row].cpu()
    documents = torch.zeros_like(batch.token_ids[row]) if batch.documents is None else batch.documents[row]
    answers = []
    for document in documents[batch.loss_mask[row]].unique().tolist():
        inside = (documents == document).cpu()
        trained = (mask & inside).nonzero()[:, 0]
        answers.append((row, int(inside.nonzero()[0]), int(trained[0]), int(trained[-1]) + 1))
    return answers
