"""The settings of the commands that train drafters of several kinds: `quickstart` and `auto`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from draftsmith.models.errors import UserError
from draftsmith.models.ranges import BatchSize, FilePath, Name, Number, Temperature, TwoOrMore
from draftsmith.recipes.configs.command_settings import (
    DECODING,
    INPUT,
    MEASURING,
    OUTPUT,
    SAMPLED,
    Minutes,
    OnDevice,
    option,
)

Hours = Annotated[Number, Field(ge=0.001)]
RACING = "eagle3,medusa,hydra,dflash,draft_model"  # kinds that race where none are named


@dataclass(frozen=True, kw_only=True)
class OfKinds(OnDevice):
    """A target, for which drafters of some kinds are trained by the recipes whose names begin with `quickstart_`."""

    target: Name | None = option(INPUT, "Hub name or directory (one is shipped)", None, "T")
    drafters: Name = option(INPUT, "kinds that train, separated by commas", metavar="KINDS")

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


@dataclass(frozen=True, kw_only=True)
class QuickstartSettings(OfKinds):
    """Train and measure drafters with nothing to download.

    example:
      draftsmith quickstart --minutes 10
    """

    drafters: Name = option(INPUT, "kinds, separated by commas", "eagle3,hydra,medusa,draft_model", "KINDS")
    minutes: Minutes = option(MEASURING, "time for everything: more trains longer", 10.0, "X")
    out: FilePath = option(OUTPUT, "folder to write", Path("runs/quickstart"), "DIR")


@dataclass(frozen=True, kw_only=True)
class AutoSettings(OfKinds):
    """Find the best drafter for a target and its traffic that a time can buy.

    example:
      draftsmith auto --target MODEL --traffic logs.jsonl --budget 8 --engine vllm --out runs/auto
    """

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
