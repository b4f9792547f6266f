"""Speed tables of the kernels: ``pytest bench/kernels --benchmark-only --kvq-out DIR``."""
