"""Benchmarks: one file a question, run as ``python -m benchmarks.NAME``; ``python -m benchmarks`` runs them all."""
