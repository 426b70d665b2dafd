"""A profile: where the time of a step goes, by stage, part and roofline (docs/profiling.md)."""

import tempfile
from pathlib import Path

from mtp_jax.lab.bench.subject import load
from mtp_jax.lab.profiling.run import Options, profile


def main(out: Path, model: str = "demo", steps: int = 10) -> str:
    """Write traces, HLO and costs to ``out``, and return the report."""
    options = Options("decode", batch=1, input_len=16, steps=steps, depth=0, temperature=0.0)
    report = profile(load(model, drafts=False), options, out).text()
    print(report)
    return report


if __name__ == "__main__":
    main(Path(tempfile.mkdtemp(prefix="mtp-jax-profile-")))
