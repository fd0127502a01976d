"""Attention modules that swap for one another: C2PSA and the baselines it is compared with.

All three are built as ``Module(d_model, num_heads, ..., causal=, bias=, checkpoint=)`` and called as
``module(x, key_padding_mask=, cache=)``.
"""

from octavo.nn.c2psa import C2PSA
from octavo.nn.kv_cache import KVCache
from octavo.nn.linformer import LinformerAttention
from octavo.nn.mha import MultiHeadAttention

__all__ = ["C2PSA", "KVCache", "LinformerAttention", "MultiHeadAttention"]
