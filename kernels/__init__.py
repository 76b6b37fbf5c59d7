"""Paged attention and page writes, one signature for every implementation."""
