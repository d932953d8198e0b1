"""Qwen3-MoE in PyTorch, written to be trained on a CPU; the parameter names are those of the Hugging Face checkpoint.

The experts of a layer run as one batched matrix product over a fixed number of places each ("capacity"), because
products of changing size are several times slower here. Tokens that find their expert full skip it during training;
in evaluation the capacity is what the fullest expert needs, so nothing is dropped.

Shapes: B sequences, T tokens of one, H hidden, E experts, K chosen, F expert width, C capacity.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The model's dimensions, named as in config.json; every in-dimension is a multiple of the quantisation group."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 128
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.group = shape.num_attention_heads // shape.num_key_value_heads
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(shape.head_dim, shape.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, length, -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin).to(v.dtype)
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin).to(v.dtype)
        k, v = (r.repeat_interleave(self.group, 1) for r in (k, v.transpose(1, 2)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding; halves, not pairs, are rotated."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Dispatch(torch.autograd.Function):
    """Copy tokens to their places; the gradient gathers from the places again, so neither way scatters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return F.embedding(token, x)  # [E * C, H]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        gathered = F.embedding(place, with_empty_place(grad))  # [B * T, K, H]
        return gathered.sum(1), None, None


class Combine(torch.autograd.Function):
    """Weighted sum of what the chosen experts made of each token."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(y, weight, token, place)
        return torch.bmm(weight.to(y.dtype).unsqueeze(1), F.embedding(place, with_empty_place(y))).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y, weight, token, place = ctx.saved_tensors
        at_place = torch.zeros(len(token) + 1, dtype=y.dtype).scatter_(0, place.flatten(), weight.flatten().to(y.dtype))
        grad_y = F.embedding(token, grad.to(y.dtype)) * at_place[:-1, None]
        grad_weight = torch.bmm(F.embedding(place, with_empty_place(y)), grad.to(y.dtype).unsqueeze(-1)).squeeze(-1)
        return grad_y, grad_weight.to(weight.dtype), None, None


def with_empty_place(x: Tensor) -> Tensor:
    """A row of zeros appended: where tokens without a place point."""
    return F.pad(x, (0, 0, 0, 1))


@dataclass
class Routing:
    """What one layer's router decided for the last batch."""

    chosen: Tensor  # [B * T, K]
    counts: Tensor  # [E]
    balance: Tensor  # load-balance loss, 1 when even


class SparseExperts(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        experts, width, hidden = shape.num_experts, shape.moe_intermediate_size, shape.hidden_size
        self.top_k = shape.num_experts_per_tok
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.gate_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.routing: Routing | None = None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the K chosen experts, [B * T, K] each; softmax over all first (Qwen3-MoE)."""
        with torch.autocast("cpu", enabled=False):
            share = F.linear(x.float(), self.gate.weight).softmax(-1)
        weight, chosen = share.topk(self.top_k, -1)
        counts = torch.bincount(chosen.flatten(), minlength=share.shape[1])
        balance = share.shape[1] * (counts / chosen.numel() * share.mean(0)).sum()
        self.routing = Routing(chosen, counts, balance)
        return weight / weight.sum(-1, keepdim=True), chosen

    def places(self, chosen: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, int]:
        """(token at each place [E * C], place of each choice [B * T, K], C); place E * C means "found it full"."""
        experts, choices = counts.numel(), chosen.numel()
        capacity = -(-choices * 5 // (4 * experts * 64)) * 64 if self.training else int(counts.max())
        order = chosen.flatten().argsort(stable=True)
        expert = chosen.flatten()[order]
        rank = torch.arange(choices) - (counts.cumsum(0) - counts)[expert]
        place_in_order = torch.where(rank < capacity, expert * capacity + rank, experts * capacity)
        place = torch.empty_like(order).scatter_(0, order, place_in_order).view_as(chosen)
        token = torch.zeros(experts * capacity + 1, dtype=torch.long)
        token.scatter_(0, place.flatten(), torch.arange(choices) // self.top_k)
        return token[:-1], place, capacity

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weight, chosen = self.route(flat)
        assert self.routing is not None
        token, place, capacity = self.places(chosen, self.routing.counts)
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype
        placed = Dispatch.apply(flat.to(dtype), token, place)  # type: ignore[no-untyped-call]
        placed = placed.view(-1, capacity, x.shape[-1])  # [E, C, H]
        gate, up, down = (w.to(dtype).mT for w in (self.gate_proj, self.up_proj, self.down_proj))
        made = torch.bmm(F.silu(torch.bmm(placed, gate)) * torch.bmm(placed, up), down)
        combined: Tensor = Combine.apply(made.flatten(0, 1), weight, token, place)  # type: ignore[no-untyped-call]
        return combined.view_as(x)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = SparseExperts(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Model(nn.Module):
    """Token ids [B, T] to logits [B, T, V]; the head is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        half = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angle = torch.outer(torch.arange(float(shape.max_position_embeddings)), shape.rope_theta**-half)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.initialise()

    def initialise(self) -> None:
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                is_small = "embed" in name or name.endswith("mlp.gate.weight")
                nn.init.normal_(weight, std=0.02 if is_small else 0.5 * weight.shape[-1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj")):
                weight.data.mul_((2 * self.shape.num_hidden_layers) ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.embed_tokens(ids).float()
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])  # type: ignore[index]
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def routings(self) -> list[Routing]:
        """Each layer's routing of the last batch."""
        return [layer.mlp.routing for layer in self.layers]  # type: ignore[misc, union-attr]
