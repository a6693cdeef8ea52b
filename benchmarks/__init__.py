"""Named workloads that measure asymcheck against the machine's own limits: ``python -m benchmarks WORKLOAD``."""
