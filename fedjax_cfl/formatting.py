"""Numbers as people read them."""

# the terminal


def format_si(value: float, unit: str) -> str:
    """Formats with a decimal prefix: scaled(3.2e9, "B") is "3.20 GB"."""
    for power, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= power:
            return f"{value / power:.2f} {prefix}{unit}"
    return f"{value:g} {unit}"
