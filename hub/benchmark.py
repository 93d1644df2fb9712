"""What `kernels benchmark` times: a norm, a gated activation, a rotation, each against the formula in torch."""

import torch
from kernels.benchmark import Benchmark

ROWS, DIM, HEADS, HEAD_DIM = 4096, 4096, 32, 128


class Llama(Benchmark):
    """The sizes of Llama 3 8B with a prompt of 4096 tokens; a sixteenth of the rows on a CPU.

    Results are compared within 0.01. Sums and exponentials may turn a rounding of bf16 by one step, so values are
    small enough that a step is less."""

    seed = 0

    def _randn(self, *shape):
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def _rows(self):
        return ROWS // 16 if self.device == "cpu" else ROWS

    def setup_rms_norm(self):
        self.x, self.weight = self._randn(self._rows(), DIM), self._randn(DIM) / 32
        self.out = torch.empty_like(self.x)

    def benchmark_rms_norm(self):
        self.kernel.rms_norm(self.x, self.weight, eps=1e-5, rounding=self.kernel.ROUND_NORM, out=self.out)

    def verify_rms_norm(self):
        wide = self.x.float()
        normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * normalised.to(self.x.dtype)

    def setup_silu_and_mul(self):
        self.x = self._randn(self._rows(), 2 * 14336) / 5
        self.out = self._randn(self._rows(), 14336)

    def benchmark_silu_and_mul(self):
        self.kernel.silu_and_mul(self.out, self.x)

    def verify_silu_and_mul(self):
        gate, value = self.x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * value

    def setup_rope(self):
        rows = self._rows()
        self.q, self.k = (self._randn(1, rows, heads, HEAD_DIM) for heads in (HEADS, HEADS // 4))
        angle = torch.arange(rows)[:, None] * 500000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        table = torch.cat((angle, angle), -1).to(self.device)
        self.cos, self.sin = table.cos().to(torch.bfloat16), table.sin().to(torch.bfloat16)
        self.out, self.k_out = torch.empty_like(self.q), torch.empty_like(self.k)

    def benchmark_rope(self):
        self.kernel.rope(
            self.q, self.k, self.cos, self.sin, rounding=self.kernel.ROUND_STEPS, q_out=self.out, k_out=self.k_out
        )

    def verify_rope(self):
        cos, sin = self.cos[:, None], self.sin[:, None]

        def rotated(x):
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat((-b, a), -1) * sin

        q, k = rotated(self.q), rotated(self.k)
        if not torch.allclose(k.float(), self.k_out.float(), atol=1e-2):
            raise ValueError("rope: k differs")
        return q
