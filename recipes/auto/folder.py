"""The folder of a search: where its files lie, and what the drafters are called that lie there."""

from dataclasses import dataclass
from pathlib import Path

from draftsmith.inference.planning.costs import Costs
from draftsmith.models.storage.reading import read_typed
from draftsmith.recipes.auto.score import Score
from draftsmith.recipes.auto.traffic import DividedPrompts
from draftsmith.recipes.evaluation.comparison import evaluation_paths
from draftsmith.train.run_folder.checkpoint import checkpoint_name


@dataclass(frozen=True)
class SearchFolder:
    """The paths of a search. A kind has a run of its own, which is named as the kind is."""

    path: Path

    @property
    def state(self) -> Path:
        return self.path / "auto.json"

    @property
    def page(self) -> Path:
        return self.path / "auto.html"

    @property
    def prompts(self) -> DividedPrompts:
        return DividedPrompts(self.path / "prompts")

    @property
    def answered(self) -> Path:
        """The prompts to train on that the target answers."""
        return self.path / "prompts" / "answered.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def features(self) -> Path:
        return self.path / "features"

    @property
    def comparison(self) -> Path:
        """The folder of what was measured at the end."""
        return self.path / "comparison"

    @property
    def export(self) -> Path:
        return self.path / "export"

    def run(self, kind: str) -> Path:
        return self.path / kind

    def checkpoint(self, kind: str, steps: int) -> Path:
        return self.run(kind) / "checkpoints" / checkpoint_name(steps)

    def costs_file(self, name: str) -> Path:
        """Return where the costs of a kind, a lookup or a cascade are kept."""
        return self.path / "costs" / f"{name}.json"

    def costs(self, name: str) -> Costs:
        """Return the costs of a kind, a lookup or a cascade that has a score."""
        return read_typed(Costs, self.costs_file(name))

    def drafter_of(self, name: str, steps: int) -> str:
        """Return what `load_drafter` calls a kind, or a lookup before it, after so many steps; a lookup has none."""
        *lookup, kind = name.split("+")
        return "+".join([*lookup, str(self.checkpoint(kind, steps)) if steps else kind])

    def evaluations(self, scores: list[Score]) -> list[Path]:
        """Return the files of what was measured at the end of those that have scores."""
        return evaluation_paths(self.comparison, self.drafters_of(scores))

    def drafters_of(self, scores: list[Score]) -> list[str]:
        """Return what `load_drafter` calls those that have scores."""
        return [self.drafter_of(score.name, score.steps) for score in scores]
