"""The second backend: what the coordinator and the workers compute, through `mlx.core` (`--backend mlx`).

    device      MLX in this process: threads, caches, numbers in and out
    matrices    resident matrices, in the form they are stored in where MLX has it
    attention, kv_cache, router, experts       the coordinator's part
    slabs, expert_tier, expert_stage           the workers' part

Only the coordinator and the workers import this, and only when they have been told to. docs/architecture.md says what
differs from the compiled kernels.
"""
