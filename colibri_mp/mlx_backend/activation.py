"""What stands between gate, up and down."""

import mlx.core as mx

from colibri_mp.specs import ClampedSwiGLU


def activate(gate: mx.array, up: mx.array, clamp: ClampedSwiGLU | None) -> mx.array:
    """silu(gate) * up, or gpt_oss's form of it (`specs.ClampedSwiGLU`); float32."""
    if clamp is None:
        return gate * mx.sigmoid(gate) * up
    gate, up = mx.minimum(gate, clamp.limit), mx.clip(up, -clamp.limit, clamp.limit)
    return (up + 1) * gate * mx.sigmoid(clamp.alpha * gate)
