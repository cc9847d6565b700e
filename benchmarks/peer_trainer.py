"""Run `speculators train` on a CPU: called by peer_learning.py with the Python of an environment that has speculators.

    PYTHON benchmarks/peer_trainer.py OPTION ...        the options of `speculators train`

Its trainer knows accelerators alone and is told here that its device is a CPU. It does not validate, for validation
costs time that the other side does not spend.
"""

import sys

import torch
from speculators.train import cli, trainer
from speculators.train.config import TrainConfig


def main() -> None:
    torch.set_num_threads(1)
    trainer.get_local_rank = lambda: torch.device("cpu")  # to which it moves model and batches
    trainer.Trainer.val_epoch = lambda self, epoch: None
    trainer._StepTimer.reset = lambda self, enabled: None  # it would synchronise with an accelerator
    cli.main(TrainConfig.resolve(sys.argv[1:]))


if __name__ == "__main__":
    main()
