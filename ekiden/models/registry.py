"""Model type to class, one line a model; the module is imported on use.

Importing this file does not import torch.
"""

from __future__ import annotations

MODELS = {
    "llama": "ekiden.models.llama:LlamaModel",
    "mistral": "ekiden.models.llama:LlamaModel",
    "qwen2": "ekiden.models.llama:LlamaModel",
    "qwen3": "ekiden.models.llama:LlamaModel",
}
