"""From a kernel's source to its launch: compiler, cache, device, launches, tensor maps."""
