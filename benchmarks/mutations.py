"""Forty changes of one line each, in what must never be wrong by a line: every one must make a test fail.

    python benchmarks/mutations.py [--jobs N] [--only TEXT]

Verification rules and their kernels decide whether the output is the target's; losses decide what a drafter learns;
the rules of loading decide whether an engine computes what was trained. Each mutation is applied alone, in a copy of
the working tree, and the test files of its subject are run until the first failure. A table says which test caught it;
the exit code is 1 unless all were caught. A mutation whose line is gone is an error that names it, before any test is
run: give the mutation its new line.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
TIME_LIMIT = 900.0  # seconds for the tests of one mutation

RULES = "inference/verification/acceptance_rules.py"
ACCEPTANCE = "inference/verification/acceptance_kernels.py"
REJECTION = "inference/verification/sampled_draft_kernels.py"
DIVERGENCES = "models/losses/divergences.py"
CHAIN_LOSS = "models/losses/chain_loss.py"
LOSS_KERNELS = "models/losses/divergence_kernels.py"
UNROLLED = "models/eagle_parts/eagle_layer.py"
ATTENTION = "models/eagle_parts/unrolled_attention.py"
LAYOUTS = "models/drafter_parts/layouts.py"
KEY_NAMES = "recipes/engine_rules/engine_key_names.py"
LAYOUT_CHECK = "recipes/engine_rules/layout_check.py"

VERIFICATION_TESTS = (
    "tests/inference/test_verify.py",
    "tests/inference/test_verify_rows.py",
    "tests/inference/test_costs.py",
)
KERNEL_TESTS = ("tests/inference/test_verify_kernels.py",)
LOSS_TESTS = (
    "tests/models/test_losses.py",
    "tests/models/test_drafters.py",
    "tests/models/test_drafter_families.py",
    "tests/train/test_vocabulary.py",
)
LOSS_KERNEL_TESTS = ("tests/models/test_divergence_kernels.py",)
UNROLLED_TESTS = ("tests/models/test_unrolled_attention.py", "tests/models/test_drafters.py")
LAYOUT_TESTS = ("tests/models/test_layouts.py",)
LOADER_TESTS = ("tests/recipes/test_layout_check.py", "tests/recipes/test_export.py")

TESTS = {
    RULES: VERIFICATION_TESTS,
    ACCEPTANCE: KERNEL_TESTS,
    REJECTION: KERNEL_TESTS,
    DIVERGENCES: LOSS_TESTS,
    CHAIN_LOSS: LOSS_TESTS,
    LOSS_KERNELS: LOSS_KERNEL_TESTS,
    UNROLLED: UNROLLED_TESTS,
    ATTENTION: UNROLLED_TESTS,
    LAYOUTS: LAYOUT_TESTS,
    KEY_NAMES: LOADER_TESTS,
    LAYOUT_CHECK: LOADER_TESTS,
}


@dataclass(frozen=True)
class Mutation:
    """One changed line: `before` stands exactly once in the file, and `after` takes its place."""

    name: str
    file: str
    before: str
    after: str


MUTATIONS = (
    # verification rules
    Mutation("greedy: the least likely token", RULES, "walk(logits.argmax(-1)", "walk(logits.argmin(-1)"),
    Mutation(
        "one_hot: one coin for all depths",
        RULES,
        "uniforms.gather(1, depths.expand",
        "uniforms.gather(1, 0 * depths.expand",
    ),
    Mutation(
        "probabilistic: a zero coin accepts p = 0",
        RULES,
        "(accept_uniforms * q_draft < p_draft)",
        "(accept_uniforms * q_draft <= p_draft)",
    ),
    Mutation(
        "probabilistic: tests a draft of q = 0",
        RULES,
        "drawn = (drafts >= 0) & (q_draft > 0)\n",
        "drawn = drafts >= 0\n",
    ),
    Mutation(
        "block: weights forget the drafts before",
        RULES,
        "torch.minimum(weights[-1] * p_x, q_x)",
        "torch.minimum(p_x, q_x)",
    ),
    Mutation("block: a threshold without its divisor", RULES, "surplus / room)[:, 1:]", "surplus)[:, 1:]"),
    Mutation(
        "without_replacement: q keeps the rejected",
        RULES,
        "_normalised(q_remaining.scatter(1, token, 0))",
        "_normalised(q_remaining)",
    ),
    Mutation(
        "without_replacement: a residual not normalised",
        RULES,
        "_normalised((p_remaining - q_remaining).clamp(min=0))",
        "(p_remaining - q_remaining).clamp(min=0)",
    ),
    Mutation("typical: epsilon bounds from below", RULES, ".clamp(max=epsilon)", ".clamp(min=epsilon)"),
    Mutation(
        "synthetic: accepts behind a rejection",
        RULES,
        "(uniforms < rates).long().cumprod(1).bool()",
        "(uniforms < rates)",
    ),
    Mutation(
        "walk: counts matches behind a mismatch",
        RULES,
        "== tokens).long().cumprod(1).sum(1)",
        "== tokens).long().sum(1)",
    ),
    Mutation(
        "walk: a drafted token of any parent",
        RULES,
        "(parents + 1 == column) & (tokens == targets.gather(1, column))",
        "(tokens == targets.gather(1, column))",
    ),
    Mutation(
        "chains: the residual where nothing was drawn",
        RULES,
        "use_residual = F.pad(drawn, (0, 1))[rows, num_accepted] & ",
        "use_residual = ",
    ),
    # their kernels
    Mutation(
        "kernel, greedy: a token's place in its chunk", ACCEPTANCE, "+ chunk, chunk * CHUNK + lane)", "+ chunk, lane)"
    ),
    Mutation(
        "kernel, walk: a drafted token of any column",
        ACCEPTANCE,
        "(parent == column) & (token == target)",
        "(token == target)",
    ),
    Mutation(
        "kernel, typical: entropy of the wrong sign", ACCEPTANCE, "delta * tl.exp(-entropy)", "delta * tl.exp(entropy)"
    ),
    Mutation(
        "kernel, probabilistic: every draft stands", REJECTION, "(coin * q_x < p_x)  # strict", "(coin < p_x)  # strict"
    ),
    Mutation(
        "kernel, block: weights forget the drafts before",
        REJECTION,
        "tl.minimum(weight * p_n, q_n)",
        "tl.minimum(p_n, q_n)",
    ),
    Mutation(
        "kernel, block: the first length, not the longest",
        REJECTION,
        "num_accepted = tl.max(tl.where(is_length & (coin < threshold), nodes, 0), 0)",
        "num_accepted = tl.min(tl.where(is_length & (coin < threshold), nodes, NODES), 0) % NODES",
    ),
    Mutation("kernel, without_replacement: q keeps the tried", REJECTION, "untried -= tried", "untried -= 0 * tried"),
    Mutation(
        "kernel, without_replacement: twins are tried",
        REJECTION,
        "waiting = waiting & (token != x)",
        "waiting = waiting & (columns != child)",
    ),
    # losses
    Mutation(
        "acceptance within the draft vocabulary alone",
        DIVERGENCES,
        "inside[rows] = (log_sum[rows] - logits[rows].float().logsumexp(-1, keepdim=True)).exp()",
        "inside[rows] = 1",
    ),
    Mutation(
        "lk_hybrid: weights change places",
        DIVERGENCES,
        "weight * kl + (1 - weight) * rejection",
        "weight * rejection + (1 - weight) * kl",
    ),
    Mutation(
        "reverse_kl: a gradient without its mean",
        DIVERGENCES,
        "return loss, q * (ratio - loss[:, None])",
        "return loss, q * ratio",
    ),
    Mutation("teachers one slot early", CHAIN_LOSS, "+ 1 + depth", "+ depth"),
    Mutation(
        "a depth counts behind an untrained token",
        CHAIN_LOSS,
        "counted = self._chains & shift_left(self.loss_mask, predicted)",
        "counted = shift_left(self.loss_mask, predicted)",
    ),
    Mutation(
        "a depth counts behind an undraftable token",
        CHAIN_LOSS,
        "counted if self.draftable is None else counted & shift_left(self.draftable, predicted)",
        "counted",
    ),
    Mutation(
        "weights of depths left out of the gradient",
        CHAIN_LOSS,
        "logits.detach(), weights)",
        "logits.detach(), torch.ones_like(weights))",
    ),
    Mutation(
        "kernel, sums of blocks on different bases",
        LOSS_KERNELS,
        "total = total * tl.exp(largest - base) +",
        "total = total +",
    ),
    Mutation(
        "kernel, acceptance within the draft vocabulary", LOSS_KERNELS, "tl.minimum(q, p * inside)", "tl.minimum(q, p)"
    ),
    Mutation(
        "kernel, jensen_shannon: half of its gradient",
        LOSS_KERNELS,
        "gradient = 0.5 * q * (log_q",
        "gradient = 0.25 * q * (log_q",
    ),
    # the unrolled EAGLE-3 loss
    Mutation(
        "unrolled: slots are fed their own token",
        UNROLLED,
        "torch.arange(part.first + 1, part.last + self.num_steps",
        "torch.arange(part.first, part.last + self.num_steps - 1",
    ),
    Mutation(
        "unrolled: positions stand still",
        UNROLLED,
        "self.positions[self.places] + k",
        "self.positions[self.places]",
    ),
    Mutation("unrolled: a step does not see itself", UNROLLED, "[*own, (key, value)], self.slots)", "own, self.slots)"),
    Mutation(
        "unrolled: the text's part is not scaled down",
        ATTENTION,
        "output.mul_((log_sum - whole).exp()[..., None])",
        "output.mul_((whole - whole).exp()[..., None])",
    ),
    # how checkpoints are read, and which files an engine loads
    Mutation("nested layer ids are taken as they stand", LAYOUTS, "[layer_id + 1 for layer_id in ids]", "list(ids)"),
    Mutation(
        "a reordered vocabulary is let through", LAYOUTS, 'if "d2t" in tensors and tensors["d2t"].any():', "if False:"
    ),
    Mutation(
        "SGLang: layer ids are not shifted", LAYOUT_CHECK, "ids = [layer_id + 1 for layer_id in ids]", "ids = list(ids)"
    ),
    Mutation(
        "tables of the draft vocabulary are not compared",
        LAYOUT_CHECK,
        'and not same_tokens(tensors["d2t"], tensors["t2d"]):',
        "and False:",
    ),
    Mutation("EAGLE-3's head as wide as the target's", KEY_NAMES, '"lm_head.weight": "R H"', '"lm_head.weight": "V H"'),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="mutations tried at a time, each in a copy of its own")
    parser.add_argument("--only", default="", help="those whose name or file contains this")
    args = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if args.only in f"{mutation.file} {mutation.name}"]
    lost = [error for mutation in chosen if (error := why_not_applicable(mutation))]
    if lost:
        print("\n".join(lost), file=sys.stderr)
        return 1
    with copies(args.jobs) as pool, ThreadPoolExecutor(args.jobs) as threads:
        files = tuple(sorted({test for mutation in chosen for test in TESTS[mutation.file]}))
        with pool.copy() as folder:
            outcome = run_tests(folder, files)
        if outcome.exit_code:
            print(f"the tests fail without any mutation:\n{outcome.output}", file=sys.stderr)
            return 1
        outcomes = list(threads.map(pool.try_mutation, chosen))
    table = Table("mutation", "file", "seconds", "caught by")
    for mutation, outcome in zip(chosen, outcomes, strict=True):
        table.add_row(mutation.name, mutation.file, f"{outcome.seconds:.0f}", outcome.caught_by or "[red]SURVIVED")
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    num_caught = sum(outcome.caught_by is not None for outcome in outcomes)
    print(f"{num_caught} of {len(chosen)} caught")
    return int(num_caught < len(chosen))


def why_not_applicable(mutation: Mutation) -> str | None:
    """Return what is wrong with a mutation; None where its line stands exactly once, and its tests are there."""
    for file in (mutation.file, *TESTS[mutation.file]):
        if not (ROOT / file).is_file():
            return f"{mutation.name}: {file} is not there"
    count = (ROOT / mutation.file).read_text("utf-8").count(mutation.before)
    return None if count == 1 else f"{mutation.name}: {mutation.before!r} stands {count} times in {mutation.file}"


@dataclass
class Outcome:
    """What running some test files came to."""

    exit_code: int  # that of pytest; -1: the time limit was reached
    output: str
    seconds: float

    @property
    def caught_by(self) -> str | None:
        """The first test that failed; None where all passed, or where no test could be run."""
        if self.exit_code == -1:
            return "the time limit"
        failed = re.search(r"^(?:FAILED|ERROR) \S+?([^/\s]+::\S+)", self.output, re.MULTILINE)
        return failed[1] if self.exit_code == 1 and failed else None


def run_tests(folder: Path, tests: tuple[str, ...]) -> Outcome:
    """Run test files of a copy until the first failure, on the product of that copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line", *tests]
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / ".typing"),
        "PYTHONDONTWRITEBYTECODE": "1",  # a changed file of the same size in the same second looks unchanged
        "HF_HUB_OFFLINE": "1",
    }
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT, check=False
        )
        code, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        code, output = -1, ""
    return Outcome(code, output, time.perf_counter() - start)


class Copies:
    """Copies of the working tree, each used by one mutation at a time."""

    def __init__(self, folders: list[Path]) -> None:
        self._free: Queue[Path] = Queue()
        for folder in folders:
            self._free.put(folder)

    @contextmanager
    def copy(self) -> Iterator[Path]:
        folder = self._free.get()
        yield folder
        self._free.put(folder)

    def try_mutation(self, mutation: Mutation) -> Outcome:
        """Run the tests of a mutation's file with the mutation applied, and undo it."""
        with self.copy() as folder:
            path = folder / mutation.file
            original = path.read_text("utf-8")
            path.write_text(original.replace(mutation.before, mutation.after), "utf-8")
            outcome = run_tests(folder, TESTS[mutation.file])
            path.write_text(original, "utf-8")
        print(f"{outcome.caught_by or 'SURVIVED'}: {mutation.name}", file=sys.stderr)
        return outcome


@contextmanager
def copies(number: int) -> Iterator[Copies]:
    """Yield copies of all files that git knows or would take, removed at the end."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(index) for index in range(number)]
        for folder in folders:
            for file in filter(None, listed.split("\0")):
                if (ROOT / file).is_file() or (ROOT / file).is_symlink():
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / file, folder / file, follow_symlinks=False)
        yield Copies(folders)


if __name__ == "__main__":
    sys.exit(main())
