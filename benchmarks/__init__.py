"""The performance suite: workloads, SLOs, one timer, the runner and the report; installed as `portable.benchmarks`."""
