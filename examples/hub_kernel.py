"""adze as a Hub package, loaded from a folder by the kernels library: its norm compared with torch's.

make hub && python examples/hub_kernel.py [folder]
"""

import pathlib
import sys

import torch
from kernels import get_loaded_kernels, get_local_kernel

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build/hub/adze")
adze = get_local_kernel(folder)
device = "cuda" if torch.cuda.is_available() else "cpu"
x, weight = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in [(64, 4096), (4096,)])
with torch.no_grad():
    ours = adze.rms_norm(x, weight, eps=1e-6)
    theirs = torch.nn.functional.rms_norm(x, (4096,), weight, 1e-6)

print(f"{get_loaded_kernels()[0].metadata.id}: rms_norm of bf16[64, 4096] on {device}")
print(f"equal to torch: {(ours == theirs).float().mean():.2%} of all values")
print(f"largest difference: {(ours.float() - theirs.float()).abs().max():.3g}")
