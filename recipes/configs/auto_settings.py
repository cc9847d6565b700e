"""The settings of `draftsmith auto`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from draftsmith.models.errors import UserError
from draftsmith.models.ranges import BatchSize, FilePath, Name, Number, Temperature, TwoOrMore
from draftsmith.recipes.configs.command_settings import DECODING, INPUT, MEASURING, OUTPUT, SAMPLED, OnDevice, option

Hours = Annotated[Number, Field(ge=0.001)]
RACING = "eagle3,medusa,hydra,dflash,draft_model"  # kinds that race where none are named


@dataclass(frozen=True, kw_only=True)
class AutoSettings(OnDevice):
    """Find the best drafter for a target and its traffic that a time can buy.

    example:
      draftsmith auto --target MODEL --traffic logs.jsonl --budget 8 --engine vllm --out runs/auto
    """

    target: Name | None = option(INPUT, "Hub name or directory (one is shipped)", None, "T")
    traffic: Name = option(INPUT, "file, folder, Hub NAME:COLUMN or .yaml of prompts", metavar="P")
    drafters: Name = option(INPUT, "kinds that race, separated by commas", RACING, "KINDS")
    engine: Literal["vllm", "sglang"] | None = option(INPUT, "race what it serves alone", None, "ENGINE")
    keep_personal_data: bool = option(INPUT, "do not mask mail addresses, numbers and keys", False)
    temperature: Temperature = option(DECODING, SAMPLED, 0.0, "X")
    batch_size: BatchSize = option(DECODING, "requests at a time", 1, "N")
    max_new_tokens: TwoOrMore = option(DECODING, "longest answer, in tokens", 128, "N")
    budget: Hours = option(MEASURING, "hours for everything", 1.0, "HOURS")
    dry_run: bool = option(MEASURING, "say what the time allows, and train nothing", False)
    out: FilePath = option(OUTPUT, "folder to write", metavar="DIR")

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of drafters, in the order in which they were given."""
        return list(dict.fromkeys(kind.strip() for kind in self.drafters.split(",") if kind.strip()))

    def refuse_mistakes(self) -> None:
        from draftsmith.recipes.configs.recipes import RECIPES  # here, as `--help` needs no recipes

        known = [name.removeprefix("quickstart_") for name in RECIPES if name.startswith("quickstart_")]
        if not self.kinds or not set(self.kinds) <= set(known):
            raise UserError(f"--drafters {self.drafters}: choose from {', '.join(known)}")
        super().refuse_mistakes()
