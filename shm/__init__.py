"""Shared-memory expert pools: segment, byte layout, slots and eviction. See docs/pool-layout.md."""
