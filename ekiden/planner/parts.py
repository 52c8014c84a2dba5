"""What layers are made of: kinds of attention and of MLP, and the matrices of each.

Everything here counts elements, in no unit of bytes.
"""

from __future__ import annotations

import msgspec

from ekiden.planner.matrices import HEADS, INNER, KV_HEADS, Matrix, column, row, whole


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head, grouped-query (arXiv:2305.13245) or multi-query attention."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    """Last positions that a token sees, itself included; 0 for all. A local chunk counts so too."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str = ""
    """``head``: one norm for each head's width; ``whole``: over all heads; none."""
    output_gate: bool = False
    """A second query projection gates the output (Qwen3-Next)."""
    sinks: bool = False
    """A learned logit a head (gpt-oss)."""
    rotated: float = 1.0
    """Share of a head that is rotated by position."""

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotated)

    def matrices(self, hidden: int) -> list[Matrix]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        asked = q * (1 + self.output_gate)
        found = [
            *column("q_proj", "attention", asked, hidden, HEADS, bias=self.qkv_bias),
            *column("k_proj", "attention", kv, hidden, KV_HEADS, bias=self.qkv_bias),
            *column("v_proj", "attention", kv, hidden, KV_HEADS, bias=self.qkv_bias),
            *row("o_proj", "attention", hidden, q, HEADS, bias=self.o_bias),
        ]
        if self.qk_norm == "head":
            found += [whole(f"{name}_norm", "norm", self.head_dim) for name in "qk"]
        if self.qk_norm == "whole":
            found += column("q_norm", "norm", q, 1, HEADS)
            found += column("k_norm", "norm", kv, 1, KV_HEADS)
        if self.sinks:
            found += column("sinks", "norm", self.heads, 1, HEADS)
        return found


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (arXiv:2405.04434): keys and values come from one vector."""

    heads: int
    q_rank: int
    """0: queries come from the hidden state directly."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    @property
    def kv_heads(self) -> int:
        """One latent vector, whatever the heads."""
        return 1

    @property
    def rotary_dim(self) -> int:
        return self.rope_dim

    @property
    def window(self) -> int:
        return 0

    def matrices(self, hidden: int) -> list[Matrix]:
        q = self.heads * (self.nope_dim + self.rope_dim)
        made = self.heads * (self.nope_dim + self.v_dim)
        found = [
            whole("kv_a_proj", "attention", self.kv_rank + self.rope_dim, hidden),
            whole("kv_a_norm", "norm", self.kv_rank),
            *column("kv_b_proj", "attention", made, self.kv_rank, HEADS),
            *row("o_proj", "attention", hidden, self.heads * self.v_dim, HEADS),
            *column("q_proj", "attention", q, self.q_rank or hidden, HEADS),
        ]
        if self.q_rank:
            found.append(whole("q_a_proj", "attention", self.q_rank, hidden))
            found.append(whole("q_a_norm", "norm", self.q_rank))
        return found


class LinearAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Gated DeltaNet (arXiv:2412.06464), as in Qwen3-Next: a state of fixed size, no KV."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def heads(self) -> int:
        return self.key_heads

    @property
    def kv_heads(self) -> int:
        return self.key_heads

    @property
    def rotary_dim(self) -> int:
        return 0

    @property
    def window(self) -> int:
        return 0

    @property
    def channels(self) -> int:
        """Of the short convolution over queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def matrices(self, hidden: int) -> list[Matrix]:
        values = self.value_heads * self.value_dim
        return [
            *column("in_proj_qkv", "attention", self.channels, hidden, INNER),
            *column("in_proj_z", "attention", values, hidden, INNER),
            *column("in_proj_ba", "router", 2 * self.value_heads, hidden, INNER),
            *column("conv1d", "norm", self.channels, self.kernel, INNER),
            *column("dt_bias", "norm", self.value_heads, 1, INNER),
            *column("A_log", "norm", self.value_heads, 1, INNER),
            whole("norm", "norm", self.value_dim),
            *row("out_proj", "attention", hidden, values, INNER),
        ]


AnyAttention = Attention | LatentAttention | LinearAttention


class Mlp(msgspec.Struct, frozen=True, kw_only=True):
    """A dense MLP; gated (arXiv:2002.05202) unless told otherwise."""

    inner: int
    gated: bool = True
    bias: bool = False

    def matrices(self, hidden: int) -> list[Matrix]:
        ways = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        return [
            *(
                m
                for way in ways
                for m in column(way, "mlp", self.inner, hidden, INNER, bias=self.bias)
            ),
            *row("down_proj", "mlp", hidden, self.inner, INNER, bias=self.bias),
        ]


class Moe(msgspec.Struct, frozen=True, kw_only=True):
    """``experts`` gated MLPs of which a token takes ``top_k``, beside one that all tokens take."""

    experts: int
    top_k: int
    inner: int
    shared_inner: int = 0
    """Inner width of the shared experts together; 0 for none."""
    shared_gate: bool = False
    bias: bool = False
    """Of experts and router."""
    correction_bias: bool = False
    """A bias of the router that only balances load (DeepSeek-V3, arXiv:2412.19437)."""
    groups: int = 1
    """Of experts that lie together, of which a token reaches at most ``top_groups`` (node-limited
    routing, arXiv:2412.19437 section 2.1.2)."""
    top_groups: int = 1

    def matrices(self, hidden: int) -> list[Matrix]:
        found = [whole("router", "router", self.experts, hidden)]
        found += [whole("router.bias", "bias", self.experts)][: self.bias or self.correction_bias]
        found += self.expert_matrices(hidden)
        if self.shared_inner:
            found += _as_part("shared", 1, Mlp(inner=self.shared_inner).matrices(hidden))
        if self.shared_gate:
            found.append(whole("shared_gate", "router", 1, hidden))
        return found

    def expert_matrices(self, hidden: int) -> list[Matrix]:
        """Of all routed experts together."""
        one = Mlp(inner=self.inner, bias=self.bias).matrices(hidden)
        return _as_part("expert", self.experts, one)


def _as_part(part: str, copies: int, matrices: list[Matrix]) -> list[Matrix]:
    return [
        msgspec.structs.replace(m, part=part if m.part == "mlp" else m.part, copies=copies)
        for m in matrices
    ]


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder layer."""

    attention: AnyAttention
    mlp: Mlp | Moe
    norms: int = 2
    """Vectors of the hidden width, biases of norms counted."""

    def matrices(self, hidden: int) -> list[Matrix]:
        norms = [whole(f"norm{i}", "norm", hidden) for i in range(self.norms)]
        return [*self.attention.matrices(hidden), *self.mlp.matrices(hidden), *norms]
