"""The settings of the commands that make training text, as those in command_settings.py."""

from dataclasses import dataclass, fields

from draftsmith.models.errors import UserError
from draftsmith.models.ranges import (
    AboveZero,
    BatchSize,
    BelowOne,
    Count,
    Depth,
    FilePath,
    Name,
    Natural,
    Seed,
    Temperature,
)
from draftsmith.recipes.configs.command_settings import (
    DECODING,
    DRAWN,
    INPUT,
    OUTPUT,
    SAMPLED,
    Settings,
    WithChats,
    check_address,
    option,
)
from draftsmith.recipes.configs.named_files import check_names


@dataclass(frozen=True, kw_only=True)
class PrepareCommandSettings(WithChats):
    """Let the target answer prompts: the text to train on.

    example:
      draftsmith prepare --target MODEL --prompts P.jsonl --held-out-share 0.05 --out data/my
    """

    prompts: Name = option(INPUT, "file, folder, Hub NAME:COLUMN or .yaml", metavar="P")
    held_out_share: BelowOne = option(INPUT, "share kept out of training, in OUT/held_out.jsonl", 0.0, "X")
    skip_long: bool = option(INPUT, "leave out prompts beyond the context", False)
    refuse_surrogates: bool = option(INPUT, "stop at half characters, which are replaced else", False)
    max_bad_share: BelowOne = option(INPUT, "share of bad rows to leave out, in OUT/bad_rows.jsonl", 0.0, "X")
    as_given: bool = option(INPUT, "store conversations as they are", False)
    max_new_tokens: Count | None = option(DECODING, "longest answer, in tokens (docs/data.md)", None, "N")
    temperature: tuple[Temperature, ...] = option(DECODING, SAMPLED, (0.0, 1.0), "X")
    top_p: tuple[AboveZero, ...] = option(DECODING, DRAWN, (1.0,), "P")
    top_k: tuple[Natural, ...] = option(DECODING, "sample from so many likeliest tokens; 0: from all", (0,), "K")
    answers_per_prompt: Count = option(DECODING, "each at the next temperature: where prompts are few", 1, "N")
    batch_size: BatchSize = option(DECODING, "prompts answered at a time: more is faster and takes memory", 32, "N")
    seed: Seed = option(DECODING, "another seed samples other answers", 0, "N")
    drafter: Name | None = option(DECODING, "speeds the target up, such as ngram (none)", None, "D")
    draft_length: Depth | None = option(DECODING, "tokens that it drafts a round (4)", None, "K")
    endpoint: Name | None = option(DECODING, "vLLM or SGLang server that answers", None, "URL")
    dry_run: bool = option(OUTPUT, "measure what all will take; write nothing", False)
    out: FilePath = option(OUTPUT, "folder to write", metavar="DIR")

    def refuse_mistakes(self) -> None:
        of_answers = [setting for setting in fields(self) if setting.metadata["group"] == DECODING]
        changed = [setting.name for setting in of_answers if getattr(self, setting.name) != setting.default]
        if self.as_given and (changed or self.dry_run or self.skip_long):
            raise UserError("--as-given asks the target for no answers: leave out the settings of answers")
        if self.endpoint and (self.drafter or self.draft_length is not None or self.device):
            raise UserError("--drafter, --draft-length and --device do nothing behind an --endpoint: leave them out")
        if self.draft_length is not None and self.drafter in (None, "none"):
            raise UserError("--draft-length has no effect without a --drafter: leave it out, or give --drafter ngram")
        if self.endpoint:
            check_address(self.endpoint, "--endpoint")
        check_names({**vars(self), "prompts": None} if self.max_bad_share else vars(self))  # whose rows may be bad


@dataclass(frozen=True, kw_only=True)
class ConvertSettings(Settings):
    """Write samples as lines of JSON, to look at or to edit, or such lines as columns to train on.

    example:
      draftsmith convert --samples data/my --out data/lines
    """

    samples: FilePath = option(INPUT, "folder that prepare or convert wrote", metavar="DIR")
    out: FilePath = option(OUTPUT, "new folder, in the other form", metavar="DIR")
