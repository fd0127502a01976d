"""The engines that the throughput bench runs, one file each; see ``Session`` in ``octavo.bench.worker``.

Each runs in the environment that has its engine, loaded by path: none may import another, or anything
of Octavo but ``octavo.py``.
"""
