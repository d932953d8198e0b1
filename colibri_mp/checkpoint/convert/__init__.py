"""Conversion of any readable checkpoint into a container (`checkpoint.container`), with or without quantising its experts.

    plan         the source, checked from end to end, and what is to be done: nothing is written before this is known
    slabs        one expert: its pieces read, recoded and packed into a slab
    files        files that appear under their name only when they are whole; headers; checksums
    unfinished   the folder while it is being filled: who may go on with it
    conversion   the run: layer after layer, resumable, checked at the end
    report       progress and result on a terminal

    source files ─▶ read pieces ─▶ recode ─▶ pack ─▶ slab ─▶ experts-00003.safetensors.partial ─▶ fsync, rename
       (one expert at a time)      (row blocks, in threads)   └▶ xxh3-64 into the header

How the matrices of a projection change (kept, codes widened, or quantised) is `colibri_mp.recoding`'s.
Used by `colibri-cluster convert`.
"""

from colibri_mp.checkpoint.convert.conversion import Listener, Report, convert
from colibri_mp.checkpoint.convert.plan import Options
from colibri_mp.checkpoint.convert.unfinished import is_unfinished

__all__ = ["Listener", "Options", "Report", "convert", "is_unfinished"]
