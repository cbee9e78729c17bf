"""What has nothing to do with FP8: files, notices, compiled loops, threads, nested tensors, process groups."""
