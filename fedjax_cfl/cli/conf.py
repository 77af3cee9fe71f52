"""Where the configuration files are."""

from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
CONF = HERE / "conf" if (HERE / "conf").is_dir() else HERE.parent / "conf"  # a wheel, or a checkout
