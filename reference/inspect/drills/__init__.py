"""Faults that are injected into a recorded step, to see whether its reader finds them.

    faulty.py      a recorder beside which a bit flips: in memory, in a result, or inside the model of the tensor core
    drill.py       faults of each kind, drawn at random, and what became of them

`twin drill` shows the outcome; docs/record.md says what it means.
"""
