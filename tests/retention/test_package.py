from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_only_the_standard_library_is_needed():
    """Imported without site-packages: anything else would be missing."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import retention; retention.make_policy(total_blocks=8).tick"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def test_it_is_typed():
    assert (ROOT / "retention" / "py.typed").exists()


def test_everything_exported_exists_and_is_documented():
    import retention

    for name in retention.__all__:
        assert name == "POLICIES" or getattr(retention, name).__doc__
