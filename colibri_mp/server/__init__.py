"""The HTTP server: translates between HTTP and a `Cluster`, decides nothing, computes nothing. See docs/server.md."""
