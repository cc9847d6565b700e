"""The settings of the commands that train drafters by themselves: `quickstart`, `auto` and `refresh`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from draftsmith.models.errors import UserError
from draftsmith.models.ranges import (
    BatchSize,
    Count,
    FilePath,
    Name,
    Number,
    Positive,
    Seed,
    Share,
    Temperature,
    TwoOrMore,
)
from draftsmith.recipes.configs.command_settings import (
    DECODING,
    INPUT,
    MEASURING,
    OUTPUT,
    SAMPLED,
    Minutes,
    OnDevice,
    check_address,
    option,
)
from draftsmith.recipes.configs.named_files import check_names

Hours = Annotated[Number, Field(ge=0.001)]
Days = Annotated[Number, Field(gt=0)]
WITH_ROLLBACK = {"rollback", "out", "server"}  # settings of `refresh` that have an effect beside --rollback
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
        if not self.kinds or not set(map(self.family_of, self.kinds)) <= set(known):
            raise UserError(f"--drafters {self.drafters}: choose from {', '.join(known)}")
        super().refuse_mistakes()

    def family_of(self, kind: str) -> str:
        """Return the kind of drafter that one of `kinds` names."""
        return kind


@dataclass(frozen=True, kw_only=True)
class QuickstartSettings(OfKinds):
    """Train and measure drafters with nothing to download.

    example:
      draftsmith quickstart --minutes 10
    """

    drafters: Name = option(INPUT, "kinds, separated by commas", "eagle3,hydra", "KINDS")
    minutes: Minutes = option(MEASURING, "time for everything: more trains longer", 10.0, "X")
    seed: Seed = option(MEASURING, "another seed draws other prompts and starting weights", 0, "N")
    out: FilePath = option(OUTPUT, "folder to write", Path("runs/quickstart"), "DIR")


@dataclass(frozen=True, kw_only=True)
class AutoSettings(OfKinds):
    """Find the best drafter for a target and its traffic that a time can buy.

    example:
      draftsmith auto --target MODEL --traffic logs.jsonl --budget 8 --engine vllm --out runs/auto
    """

    traffic: Name = option(INPUT, "file, folder, Hub NAME:COLUMN or .yaml of prompts", metavar="P")
    drafters: Name = option(INPUT, "kinds that race; eagle3@2 has two layers", RACING, "KINDS")
    engine: Literal["vllm", "sglang"] | None = option(INPUT, "race what it serves alone", None, "ENGINE")
    keep_personal_data: bool = option(INPUT, "do not mask mail addresses, numbers and keys", False)
    temperature: Temperature | None = option(DECODING, "of the traffic (that of a log, else 0)", None, "X")
    batch_size: BatchSize = option(DECODING, "requests at a time", 1, "N")
    max_new_tokens: TwoOrMore = option(DECODING, "longest answer, in tokens", 128, "N")
    budget: Hours = option(MEASURING, "hours for everything", 1.0, "HOURS")
    check: Name | None = option(
        MEASURING,
        "let this vLLM decode what is exported, and tell costs",
        None,
        "VENV",
    )
    sla_ttft_ms: Positive | None = option(MEASURING, "latest first token of 95 % of requests", None, "MS")
    sla_tpot_ms: Positive | None = option(MEASURING, "longest later token of 95 % of requests", None, "MS")
    dry_run: bool = option(MEASURING, "say what the time allows, and train nothing", False)
    out: FilePath = option(OUTPUT, "folder to write", metavar="DIR")

    @property
    def timed_engine(self) -> Path | None:
        """The environment of the vLLM in which rounds are timed; None where they are timed in the bundled decoder."""
        return Path(self.check) if self.engine == "vllm" and self.check else None

    def family_of(self, kind: str) -> str:
        return kind.partition("@")[0]

    def refuse_mistakes(self) -> None:
        if self.check and self.engine == "sglang":
            raise UserError("--check is done by a vLLM: leave it out with --engine sglang")
        if self.check and self.check.startswith("http"):
            raise UserError(
                "--check: no running server has the drafter yet that `auto` will find: give the virtual environment "
                "of a vLLM, or serve what was exported, and give the address to `draftsmith export --check`"
            )
        super().refuse_mistakes()


@dataclass(frozen=True, kw_only=True)
class RefreshSettings(OnDevice):
    """Keep a drafter good: train it on as traffic moves, and promote only what is better.

    example:
      draftsmith refresh --target MODEL --drafter runs/my/best --traffic logs.jsonl --out refreshed
      draftsmith refresh --traffic vllm.log --follow 60 --out refreshed
      draftsmith refresh --rollback --out refreshed
    """

    target: Name | None = option(INPUT, "Hub name or directory (that of the last call)", None, "T")
    drafter: Name | None = option(INPUT, "checkpoint that serves now; at the first call", None, "D")
    traffic: Name | None = option(INPUT, "new prompts, or the log of a vLLM or SGLang", None, "P")
    history: FilePath | None = option(INPUT, "what `watch` keeps: falls of acceptance count, too", None, "FILE")
    keep_personal_data: bool = option(INPUT, "do not mask mail addresses, numbers and keys", False)
    temperature: Temperature = option(DECODING, SAMPLED, 0.0, "X")
    batch_size: BatchSize = option(DECODING, "requests at a time", 1, "N")
    max_new_tokens: TwoOrMore = option(DECODING, "longest answer, in tokens", 128, "N")
    false_alarms: Share = option(MEASURING, "share of rounds in which moved traffic may be cried wrongly", 0.05, "X")
    budget: Hours = option(MEASURING, "hours for a round", 1.0, "HOURS")
    steps: Count | None = option(MEASURING, "training steps of a round (as the budget allows)", None, "N")
    window: Days = option(OUTPUT, "days after which prompts are deleted", 30.0, "DAYS")
    follow: Minutes | None = option(OUTPUT, "look for new traffic again after so many minutes", None, "MINUTES")
    server: Name | None = option(OUTPUT, "a swappable vLLM that takes the champion", None, "URL")
    rollback: bool = option(OUTPUT, "let the champion before serve again, and do nothing else", False)
    out: FilePath = option(OUTPUT, "folder of the champions", metavar="DIR")

    def refuse_mistakes(self) -> None:
        changed = {setting.name for setting in fields(self) if getattr(self, setting.name) != setting.default}
        if self.rollback and (others := changed - WITH_ROLLBACK):
            flag = f"--{sorted(others)[0].replace('_', '-')}"
            raise UserError(f"--rollback does nothing else: leave out {flag}")
        if self.follow and not self.traffic:
            raise UserError("--follow looks for new traffic: give --traffic, too")
        if self.server:
            check_address(self.server, "--server")
        check_names({**vars(self), "traffic": None, "growing_traffic": self.traffic})
