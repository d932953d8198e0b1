"""The text model of Qwen3.5-MoE by itself, as transformers saves it: the same reader."""

from colibri_mp.models.qwen3_5_moe import build

__all__ = ["build"]
