"""The specs that the kernels read; see `colibri_mp.specs`."""

from colibri_mp.specs import AttentionSpec as AttentionSpec
from colibri_mp.specs import QKNorm as QKNorm
from colibri_mp.specs import RouterSpec as RouterSpec
