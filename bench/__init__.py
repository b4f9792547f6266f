"""Measurements and the ``kvq`` command line."""
