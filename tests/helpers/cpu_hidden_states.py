"""vLLM's connector that writes hidden states to files, for its CPU build, where the copy by a CUDA stream cannot run.

Loaded by vLLM as `kv_connector_module_path`. All but that copy is vLLM's own code.
"""

import os
from typing import Any

from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class Done:
    """In place of the event that says that the copy is done."""

    def query(self) -> bool:
        return True


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: Any) -> None:
        import torch

        blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0])
        save_file({"hidden_states": states.clone(), "token_ids": pending.token_ids.clone()}, pending.filename)
        os.close(self._lock_fds.pop(pending.req_id))
        self._req_copy_events[pending.req_id] = Done()
