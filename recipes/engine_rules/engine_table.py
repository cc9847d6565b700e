"""Which kinds of drafters each engine serves, and how that is known: the table of docs/serving.md."""

from draftsmith.recipes.engine_rules.loader_rules import UNSERVED, is_served
from draftsmith.recipes.engine_rules.other_engines import WHY_NO_OTHERS

ENGINES = ("vllm", "sglang", "transformers", "llama_cpp", "tensorrt_llm")
KINDS = (
    *("draft_model", "eagle", "eagle3", "p_eagle", "dflash", "dflash2", "dspark", "domino"),
    *("medusa", "hydra", "mlp_speculator", "mtp", "ngram", "suffix"),
)
RUN = {  # kinds that the engine itself served in a test: texts were compared with ours, counters where it drafts alike
    "vllm": ("draft_model", "eagle", "eagle3", "p_eagle", "dflash", "medusa", "mtp", "ngram", "suffix"),
    "sglang": ("draft_model", "eagle", "eagle3", "ngram"),  # on a CPU, its operators replaced by plain PyTorch
    "transformers": ("draft_model", "ngram"),
    "llama_cpp": ("draft_model", "eagle3", "dflash", "dspark", "ngram"),
    "tensorrt_llm": (),
}


def how_known(engine: str, kind: str) -> str:
    """Return "run" or "read", or "-" for a kind that the engine does not serve."""
    if not is_served(kind, engine):
        return "-"
    return "run" if kind in RUN[engine] else "read"


def engine_table() -> str:
    """Return the table in Markdown, and below it the reasons that are told of kinds that are not served."""
    lines = ["| kind | " + " | ".join(f"`{engine}`" for engine in ENGINES) + " |", "|---" * (len(ENGINES) + 1) + "|"]
    for kind in KINDS:
        lines.append(f"| {kind} | " + " | ".join(how_known(engine, kind) for engine in ENGINES) + " |")
    pairs = [(engine, kind) for kind in KINDS for engine in ENGINES if not is_served(kind, engine)]
    reasons = dict.fromkeys([*WHY_NO_OTHERS.values(), *(UNSERVED[pair] for pair in pairs if pair in UNSERVED)])
    return "\n".join([*lines, "", *(f"* {reason}." for reason in reasons)])
