"""Modules as CUDA graphs."""
