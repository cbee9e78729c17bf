"""Digests of a training's state: once (`te.digest`), and one line a step (`te.trail`), and where two trails part.

    state.py       the tensors of a model and of its optimizer, by name and kind; `te.digest`
    state_again.py the same of a model step after step, which names them once
    sums.py        192 bits that stand for a tensor, of many tensors at once, and the word in which two differ
    file.py        the file of a trail: how it is read, and what a crash leaves
    trail.py       `te.trail`
    compare.py     the first step and tensor in which trails differ

docs/two_runs.md explains how to use them.
"""
