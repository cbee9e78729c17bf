"""Benchmarks behind `twin bench`: each module has `run(progress) -> dict`, a payload for `measure.write_result`."""
