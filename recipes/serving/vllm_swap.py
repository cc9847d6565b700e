"""Takes other weights into the drafter of a running vLLM: a worker extension, for `draftsmith evaluate --engine`.

Export puts this file beside config.json and model.safetensors (`--swappable`). It imports nothing of draftsmith's:

    VLLM_SERVER_DEV_MODE=1 PYTHONPATH=DIRECTORY vllm serve TARGET --speculative-config '{"model": "DIRECTORY", ...}' \
        --worker-extension-cls vllm_swap.DraftSwap

vLLM mixes the class into its worker, and POST /collective_rpc calls its method by name. Loaded weights may lie in
memory in another order than on disk, as a CPU or a quantised layer wants them; vLLM's layerwise reload makes the layers
anew and puts them where the old ones were.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

WEIGHTS, CONFIG = "model.safetensors", "config.json"
METHODS = ("eagle", "eagle3", "draft_model")  # of vLLM whose counters were compared with a fresh server's
OWN = ("draftsmith", "architectures", "transformers_version")  # entries of config.json that do not shape the drafter


class DraftSwap:
    """The class that vLLM's `--worker-extension-cls` asks for."""

    vllm_config: Any  # of the worker

    def swap_drafter(self, folder: str) -> str:
        """Load the weights of a folder that the server sees; return why that cannot be, or an empty text.

        The drafter there must have the shape of the one that the server was started with. Nothing is loaded where it
        has not, for a load that fails halfway would leave the drafter without weights.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        settings, model = self.vllm_config.speculative_config, self.get_draft_model()  # type: ignore[attr-defined]
        if model is None:
            return "the server drafts without a model"
        if settings.method not in METHODS or settings.parallel_drafting:
            drafting = f"method {settings.method}{', parallel' * settings.parallel_drafting}"
            return f"a server of {drafting} was not seen to count after a swap as one that is started anew"
        served = settings.draft_model_config
        try:
            if reason := difference(Path(served.model), Path(folder)):
                return reason
            with torch.no_grad(), set_current_vllm_config(self.vllm_config):
                initialize_layerwise_reload(model)
                model.load_weights(iter(load_file(Path(folder) / WEIGHTS).items()))
                finalize_layerwise_reload(model, served)
                pack_tied_heads(model)
        except OSError as error:
            return f"the server cannot read it: {error}"
        return ""


def pack_tied_heads(model: torch.nn.Module) -> None:
    """Let heads that share the embedding's weights lay them out anew: the reload did so for the embedding alone.

    A CPU keeps a copy for its products, which would stay that of the weights before.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    heads = [layer for layer in layers if isinstance(layer, ParallelLMHead)]  # which are embeddings, too
    embedded = {layer.weight.data_ptr() for layer in layers if layer not in heads}
    for head in heads:
        if head.weight.data_ptr() in embedded:
            head.quant_method.process_weights_after_loading(head)


def difference(served: Path, other: Path) -> str:
    """Return how the shape of a drafter differs from that of the served one; an empty text where it does not."""
    for name, values in (("its config.json", config_of), ("the shape of its weights", shapes_of)):
        mine, theirs = values(served), values(other)
        if differing := sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)):
            return f"{name} differs from that of the served drafter in {', '.join(differing[:4])}"
    return ""


def config_of(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / CONFIG).read_text())
    return {name: value for name, value in content.items() if value is not None and name not in OWN}


def shapes_of(folder: Path) -> dict[str, Any]:
    with safe_open(folder / WEIGHTS, "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no dict)
