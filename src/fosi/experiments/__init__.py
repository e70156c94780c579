"""Trainings and studies that use FOSI through its public API; the command line runs them."""
