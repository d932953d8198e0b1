"""The worker process: owns one expert pool, reads experts from disk, computes what the coordinator routes to it."""
