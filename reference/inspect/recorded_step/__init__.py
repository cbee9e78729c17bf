"""One training step, recorded op by op on any device and run again on a CPU.

    digest.py      128 bits that stand for a tensor, computed where the tensor lies
    file.py        the one file: what the step read, its ops, their digests; how it is checked when it is read
    ops.py         which ops run again, and their arguments in JSON
    recorder.py    `te.record`: what is noted while a step runs
    about.py       the model's structure, the optimizers, where and when
    places.py      which parts of a storage have a digest that can be compared
    at_step.py     which step of a training loop is recorded
    modules.py     in which of the model's modules an op runs
    replay.py      the ops again, and the first number that differs
    words.py       what was found, in words, and which ops were judged
    statistics.py  per tensor: amax, scale, saturation, underflow, SQNR, NaN
    float64.py     the ops in float64, for SQNR

docs/record.md explains it as a whole.
"""
