"""Cuts a batch into places: rows that share their passes over the cache. Done once for all layers, before anything is touched."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp.errors import RequestError
from colibri_mp.kernels.attention_core import group_width
from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.kernels.jit import compiled
from colibri_mp.kernels.vectors import get_i32, record_at

_PLACE_FIELDS = ("row", "num_rows", "position", "sequence", "num_queries", "width", "num_groups")
PLACE = np.dtype([(name, np.int64) for name in _PLACE_FIELDS])
"""Rows of one sequence with consecutive positions; the queries, in groups of `width`, are those of one key-value head."""
PLACE_BYTES = PLACE.itemsize

_PLAN_FIELDS = (
    *("positions", "sequences", "block_table", "num_tokens", "num_sequences", "max_blocks", "num_blocks"),
    *("max_context", "window", "group_size", "rows_a_place", "width", "places"),
    *("num_places", "last_position", "bad_row"),
)
PLAN = np.dtype([(name, np.int64) for name in _PLAN_FIELDS])
"""A batch to plan; the last three are results: places made, largest position, first row in error or -1.

group_size: query vectors of a row; width: of groups, 0: `attention_core.group_width`.
"""


def cut_to_places(plan: NDArray[np.void], batch: Batch, num_blocks: int) -> tuple[tuple[int, ...], int, int]:
    """Make the places of a batch over a cache of `num_blocks` blocks; `plan`: a PLAN that says how.

    Returns the number of tokens, the addresses of positions, sequences and block table and the blocks of a row of it; the number of
    places; the largest position. Raises RequestError when a position is not in the context or in its blocks.
    """
    num_tokens, (num_sequences, max_blocks) = batch.positions.size, batch.block_table.shape
    arrays = [array.ctypes.data for array in (batch.positions, batch.sequence_idx, batch.block_table)]
    plan["positions"], plan["sequences"], plan["block_table"] = arrays
    plan["num_tokens"], plan["num_sequences"], plan["max_blocks"] = num_tokens, num_sequences, max_blocks
    plan["num_blocks"], plan["num_places"], plan["last_position"], plan["bad_row"] = num_blocks, 0, 0, -1
    plan_batch(plan.ctypes.data)
    num_places, last_position, bad_row = (int(plan[name][0]) for name in ("num_places", "last_position", "bad_row"))
    if bad_row >= 0:
        raise RequestError(
            f"row {bad_row} of a step (position {batch.positions[bad_row]}, sequence {batch.sequence_idx[bad_row]}) is "
            f"outside the context of {int(plan['max_context'][0])} tokens, the block table of {batch.block_table.shape} or the "
            f"cache of {num_blocks} blocks"
        )
    return (num_tokens, *arrays, max_blocks), num_places, last_position


@compiled
def plan_batch(plan: int) -> None:
    """Cut the batch of a PLAN (its address) into places; a row that could touch memory not its own ends it, as `bad_row`."""
    job = record_at(plan, PLAN)
    for row in range(job.num_tokens):
        position, sequence = get_i32(job.positions + 4 * row), get_i32(job.sequences + 4 * row)
        if not _is_inside(job, position, sequence):
            job.bad_row = row
            return
        job.last_position = max(job.last_position, position)
        place = record_at(job.places + max(0, job.num_places - 1) * PLACE_BYTES, PLACE)
        follows = job.num_places > 0 and place.sequence == sequence and place.position + place.num_rows == position
        if not (follows and place.num_rows < job.rows_a_place):
            place = record_at(job.places + job.num_places * PLACE_BYTES, PLACE)
            place.row, place.num_rows, place.position, place.sequence = row, 0, position, sequence
            job.num_places += 1
        place.num_rows += 1
        place.num_queries = place.num_rows * job.group_size
        place.width = job.width if job.width > 0 else group_width(place.num_queries)
        place.num_groups = (place.num_queries + place.width - 1) // place.width


@compiled
def _is_inside(job: Any, position: int, sequence: int) -> bool:
    """Whether a row and all blocks that it may read exist."""
    if not (0 <= position < job.max_context and 0 <= sequence < job.num_sequences and position // 16 < job.max_blocks):
        return False
    for block in range(max(0, position - job.window + 1) // 16, position // 16 + 1):
        block_id = get_i32(job.block_table + (sequence * job.max_blocks + block) * 4)
        if block_id < 0 or block_id >= job.num_blocks:
            return False
    return True
