"""Traces, replay, verification, and one module per figure or table."""
