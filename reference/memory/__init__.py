"""What backward needs and the GPU does not keep: computed again, or moved to the CPU."""
