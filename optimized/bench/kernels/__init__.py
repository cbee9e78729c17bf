"""Benchmarks of single operations."""
