"""Peak memory of loading and decoding, against weights plus KV: ``python benchmarks/memory.py --target DIR``.

Measured in a fresh process: resident memory after imports, then the peak (VmHWM, reset after imports where the kernel
allows it) after loading and 64 tokens. Memory-mapped weights count once they are touched, as they should.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

CHILD = """
import json, sys
import torch, transformers, foretell, foretell.model.load, foretell.model.llama.run.lean
from pathlib import Path
def status(field):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024
torch.set_num_threads(2)
torch.randn(64, 64) @ torch.randn(64, 64)
base = status("VmRSS")
try:
    Path("/proc/self/clear_refs").write_text("5")
except OSError:
    pass
target, dtype, implementation = sys.argv[1:4]
engine = foretell.Engine.load(target, dtype=dtype, implementation=implementation)
done = engine.generate(list(range(5, 69)), temperature=0.0, max_new_tokens=64, ignore_eos=True)
peak = status("VmHWM")
spec = engine.model.spec
cache = engine.model.new_cache(1, 192)
figures = {"base": base, "peak": peak, "weights": spec.weight_bytes, "kv": cache.num_bytes}
print(json.dumps({"implementation": spec.implementation, **figures}))
"""


def main() -> int:
    """Run the child for each dtype and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--implementation", nargs="+", default=["auto", "lean"])
    options = parser.parse_args()
    rows = []
    for dtype in options.dtype:
        for implementation in options.implementation:
            done = subprocess.run(
                [sys.executable, "-c", CHILD, options.target, dtype, implementation],
                capture_output=True,
                text=True,
                check=True,
            )
            row = {"dtype": dtype, **json.loads(done.stdout.strip().splitlines()[-1])}
            row["ratio"] = (row["peak"] - row["base"]) / (row["weights"] + row["kv"])
            rows.append(row)
            print(
                f"{Path(options.target).name} {dtype} {row['implementation']}: weights {row['weights'] / 2**20:.0f} MiB, "
                f"KV {row['kv'] / 2**20:.0f} MiB, peak above imports {(row['peak'] - row['base']) / 2**20:.0f} MiB, "
                f"ratio {row['ratio']:.2f}"
            )
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
