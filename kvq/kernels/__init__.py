"""Triton kernels, one operation a file. Each has its specification in kvq/reference.py."""
