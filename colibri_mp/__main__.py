"""`python -m colibri_mp` is `colibri-cluster`."""

from colibri_mp.cli import entry_point

entry_point()
