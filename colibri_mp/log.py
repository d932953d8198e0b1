"""Logging of each process: stdlib, one line a record with the process's role. No prompt text at INFO."""

import logging
import sys


def configure(role: str, level: str = "warning") -> logging.Logger:
    """Log this process to stderr as `role` ("coordinator", "worker 1"), from `level` up; returns its logger."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {role}: %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("colibri_mp")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger
