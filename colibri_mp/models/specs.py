"""The specs that the families fill in; see `colibri_mp.specs`."""

from colibri_mp.specs import AttentionSpec as AttentionSpec
from colibri_mp.specs import QKNorm as QKNorm
from colibri_mp.specs import RopeSpec as RopeSpec
from colibri_mp.specs import RopeType as RopeType
from colibri_mp.specs import RouterSpec as RouterSpec
