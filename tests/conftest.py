"""One OpenMP thread a test, and short spins: tests share their machine with each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
