"""Where the embedded demo model is."""

from pathlib import Path


def demo_model() -> Path:
    """The directory of the embedded demo model: in an installed package, or at the top of the repository."""
    inside, beside = Path(__file__).parent / "configs", Path(__file__).parent.parent / "configs"
    return (inside if inside.exists() else beside) / "demo"
