"""Bookkeeping of KV-cache blocks: ids and counts only, no arrays (those are in `kernels.attention`).

A block holds the keys and values of a fixed number of positions of one sequence, in all layers. Blocks are reserved for
a request's whole projected length before it starts, so a running request never runs out in the middle.
"""

from colibri_mp.errors import RequestError


class BlockAllocator:
    """Hands out block ids 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` positions take."""
        return -(-num_tokens // self.block_tokens)

    def check(self, num_tokens: int) -> None:
        """Whether a request of `num_tokens` can ever run.

        Raises:
            RequestError: it is longer than the whole cache.
        """
        if self.blocks_for(num_tokens) > self.num_blocks:
            raise RequestError(
                f"the request needs KV memory for {num_tokens} tokens, the cluster has it for "
                f"{self.num_blocks * self.block_tokens}; launch with a larger --ctx or ask for less"
            )

    def acquire(self, num_tokens: int) -> list[int] | None:
        """Blocks for `num_tokens` positions, or None if too few are free now."""
        count = self.blocks_for(num_tokens)
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: list[int]) -> None:
        """Give blocks back; `blocks` is emptied."""
        while blocks:
            self._free.append(blocks.pop())

    def check_integrity(self, held: list[list[int]]) -> None:
        """Assert that the free blocks and those that requests hold are each block once."""
        everything = sorted(self._free + [block for blocks in held for block in blocks])
        assert everything == list(range(self.num_blocks)), "KV blocks lost or held twice"
