"""What stands beside exported weights: the model card with what was measured from them, and the way to the Hub."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.models.errors import UserError, first_line
from draftsmith.recipes.serving.engine_check import EngineReport
from draftsmith.recipes.serving.export import WEIGHT_FILES, Exported
from draftsmith.train.folder.run_folder import worth

WEIGHTS = ("model.safetensors", *WEIGHT_FILES.values())
WRITTEN_BY = {  # by what prepared.json says; a run of an older draftsmith did not keep it
    None: "by whom it was written is not recorded",
    "decoder": "written by the target itself",
    "endpoint": "written by the target itself, which a server ran",
    "given": "given, not written by the target (off-policy)",
}
DYNAMIC_KINDS = ("eagle", "eagle3", "draft_model")  # whose draft length vLLM can change from step to step


def served_row(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The row whose draft length is served: the fastest greedy one at the smallest batch size, or else of any."""
    smallest = min(row["batch_size"] for row in results)
    rows = [row for row in results if row["batch_size"] == smallest]
    greedy = [row for row in rows if row["temperature"] == 0]
    return max(greedy or rows, key=worth)


def schedule_of(kind: str, results: list[dict[str, Any]]) -> Schedule | None:
    """The best draft length from each measured batch size on, 0 where plain decoding was faster.

    The smallest batch size stands for those below it. None where one batch size was measured, or vLLM cannot change
    the draft length of that kind.
    """
    sizes = sorted({row["batch_size"] for row in results})
    if len(sizes) < 2 or kind not in DYNAMIC_KINDS:
        return None
    best = [max((row for row in results if row["batch_size"] == size), key=worth) for size in sizes]
    lengths = [row["draft_length"] if row["speedup"] > 1 else 0 for row in best]
    return Schedule(tuple(zip([1, *sizes[1:]], lengths, strict=True)))


@dataclass
class Findings:
    """What was found out of an exported directory; None: it was not asked for."""

    evaluation: dict[str, Any] | None = None
    check: EngineReport | None = None


def write_card(exported: Exported, source: Path, commands: dict[str, str], findings: Findings) -> None:
    """README.md of an exported directory."""
    digests = {name: sha256(exported.directory / name) for name in files_of(exported.directory)}
    training = training_facts(source)
    fingerprint = f" (fingerprint `{exported.target_fingerprint}`)" if exported.target_fingerprint else ""
    parts = [
        f"---\n{yaml.safe_dump(metadata(exported, findings.evaluation), sort_keys=False)}---\n",
        f"# {exported.kind} drafter for {exported.target}\n",
        f"Proposes tokens for `{exported.target}`{fingerprint} to verify, which makes decoding faster and leaves its "
        "output what it was. Made with draftsmith.\n",
        "## Serve it\n",
        "".join(f"{engine}:\n\n```sh\n{command}\n```\n\n" for engine, command in commands.items())
        or f"In the layout of {exported.engine}, for that project's own code.\n",
        "## Acceptance and speed\n",
        measured_text(findings.evaluation) if findings.evaluation else "Nothing was measured from this directory.\n",
        checked_text(findings.check),
        "## Training\n",
        "".join(f"* {name}: {value}\n" for name, value in training.items())
        or "Not known: no run was found beside it.\n",
        "\n## Files\n",
        "| file | sha256 |\n|---|---|\n" + "".join(f"| {name} | `{digest}` |\n" for name, digest in digests.items()),
    ]
    (exported.directory / "README.md").write_text("\n".join(parts))


def metadata(exported: Exported, evaluation: dict[str, Any] | None) -> dict[str, Any]:
    """What the Hub reads at the top of a card. A local path is no base model there."""
    data: dict[str, Any] = {"tags": ["speculative-decoding", "draftsmith", exported.kind]}
    if not Path(exported.target).exists():
        data["base_model"] = exported.target
        data["base_model_relation"] = "adapter"
    if evaluation:
        row = served_row(evaluation["results"])
        data["draftsmith"] = {
            "target": exported.target,
            "draft_length": row["draft_length"],
            "mean_acceptance_length": round(row["mean_acceptance_length"], 3),
            "speedup": round(row["speedup"], 3),
        }
    return data


def measured_text(evaluation: dict[str, Any]) -> str:
    env = evaluation["environment"]
    rows = [
        "| prompts | temperature | batch | draft length | acceptance length | speedup | 95 % | outputs identical |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in evaluation["results"]:
        interval = "-".join(f"{end:.2f}" for end in row["speedup_ci95"] or [])
        check = row["lossless"]
        rows.append(
            f"| {row['prompt_set']} ({row['num_prompts']}) | {row['temperature']:g} | {row['batch_size']} | "
            f"{row['draft_length']} | {row['mean_acceptance_length']:.2f} | {row['speedup']:.2f} | {interval}"
            f" | {check['identical']}/{check['checked']} |"
        )
        for domain, part in row.get("domains", {}).items():
            rows.append(f"| {domain} ({part['num_prompts']}) | | | | {part['mean_acceptance_length']:.2f} | | | |")
    how = (
        f"\nMeasured from this directory by draftsmith's own decoder beside plain decoding in one process, on "
        f"{env['device']}, {env['dtype']}, torch {env['versions']['torch']}, commit {env['git_commit']}:\n\n"
        f"```sh\n{env['command']}\n```\n\nAn engine's speedup is another one.\n"
    )
    return "\n".join(rows) + "\n" + how


def checked_text(check: EngineReport | None) -> str:
    """What a real engine made of the directory."""
    if check is None:
        return "No engine has served this directory yet: `draftsmith export --check` holds one against draftsmith.\n"
    theirs, ours = check.engine.counters.mean_acceptance_length, check.ours.mean_acceptance_length
    outcome = "agrees with" if check.agrees else "**disagrees with**"
    return (
        f"{check.engine.version} {outcome} draftsmith on {check.num_prompts} prompts at temperature 0 and draft length "
        f"{check.draft_length}: acceptance length {theirs:.3f} against {ours:.3f}, {check.texts.identical} of "
        f"{check.texts.checked} texts identical, {check.texts.divergences} different without a near-tie.\n"
    )


def training_facts(source: Path) -> dict[str, str]:
    """What the run that a checkpoint stands in tells of its text."""
    run = source.resolve().parent.parent
    config, environment = run / "config.yaml", run / "environment.json"
    if not (config.is_file() and environment.is_file()):
        return {}
    settings, env = yaml.safe_load(config.read_text()), json.loads(environment.read_text())
    return {
        "text": f"{settings['data']['samples']}, hash {env['data_hash']}, {WRITTEN_BY[env.get('data_written_by')]}",
        "steps": f"{source.resolve().name} of {settings['run']['steps']}",
        "seed": str(settings["run"]["seed"]),
        "commit": str(env["git_commit"]),
        "chat template hash": str(env["template_hash"]),
    }


def files_of(directory: Path) -> list[str]:
    """The files whose bytes make the drafter."""
    return ["config.json", *(name for name in WEIGHTS if (directory / name).is_file())]


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# --- the Hub


class HubApi(Protocol):
    """The two calls of huggingface_hub.HfApi that pushing takes."""

    def create_repo(self, repo_id: str, *, exist_ok: bool) -> Any: ...

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> Any: ...


def push(directory: Path, name: str, api: HubApi) -> None:
    """Upload an exported directory as the model `name`. Raises `UserError` where the Hub refuses."""
    try:
        api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(directory), commit_message="A drafter, exported by draftsmith")
    except (OSError, ValueError) as error:  # HfHubHTTPError is an OSError
        raise UserError(f"--push {name}: {first_line(error)}") from None
