"""Benchmarks of layers, and of models of a few layers."""
