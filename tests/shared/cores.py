"""A worker of pytest-xdist computes on its share of the cores. With threads for all cores, workers wait for each other.

Threads are counted when torch and numba are imported, so this is imported before them. Results do not depend on it.
"""

import os

_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _WORKERS > 1:
    for _name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(_name, str(max(1, (os.cpu_count() or 1) // _WORKERS)))
