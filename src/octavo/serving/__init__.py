"""The HTTP server: a thin asynchronous shell around the synchronous engine."""
