"""Random calls of every op, from a seed: with random shapes, strides, offsets and dtypes. Needs no torch.

    python3 bench/sweep_draw.py OP [--seed 1] [--count 40] [--megabytes 150]

prints random calls of an op as lines, without those that read and write more than this. `adze tune OP --line @FILE`
then shows for which of them another variant of the kernel is faster than the one it chooses.
"""

import argparse
import dataclasses
import math
import random

SIZES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1, "u8": 1, "bool": 1}
EPS = 1e-6
GROUP_SHAPES = [  # channels and positions (height, width) of U-Nets and VAEs; a draw changes the size and the batch
    (128, 512, 512), (128, 256, 256), (256, 256, 256), (256, 128, 128), (320, 128, 128), (320, 64, 64),
    (512, 128, 128), (512, 64, 64), (640, 64, 64), (640, 32, 32), (960, 32, 32), (1280, 32, 32), (1280, 16, 16),
    (2560, 16, 16),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Limits:
    """The least and most of what is drawn: elements of a row and bytes of a call; the most elements of a side of a
    weight; keys; and of a prompt the most products and bytes of q."""

    dim: tuple
    bytes: tuple
    side: int
    keys: tuple  # least, most of a step of decoding, and of a prompt
    products: int
    q_bytes: int


GPU = Limits((32, 131072), (64 << 10, 600 << 20), 16384, (16, 65536, 8192), 1 << 38, 1 << 27)
CPU = Limits((32, 32768), (256 << 10, 64 << 20), 8192, (16, 16384, 4096), 1 << 33, 1 << 24)
TINY = Limits((32, 2000), (4 << 10, 64 << 10), 500, (8, 300, 300), 1 << 25, 1 << 19)  # where only the code is tested


@dataclasses.dataclass(frozen=True)
class Spec:
    """A tensor. Strides and the offset count elements; the memory before the offset is aligned to 16 bytes. `values`
    are normal numbers, positive ones (scales), or bits of any kind; `size` is a factor of the former two."""

    dtype: str
    shape: tuple
    stride: tuple
    offset: int = 0
    values: str = "normal"
    size: float = 1.0

    @property
    def bytes(self):
        return math.prod(self.shape) * SIZES[self.dtype]

    @property
    def aligned(self):
        """All rows are aligned to 16 bytes."""
        steps = [s for n, s in zip(self.shape[:-1], self.stride[:-1], strict=True) if n > 1]
        return all(step * SIZES[self.dtype] % 16 == 0 for step in [*steps, self.offset])

    def __str__(self):
        sizes = ",".join(f"{n}:{s}" for n, s in zip(self.shape, self.stride, strict=True))
        return f"{self.dtype}[{sizes}]" + (f"@+{self.offset}" if self.offset else "")


def dense(shape):
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= n
    return tuple(reversed(stride))


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an op: tensors and numbers, by the names of its fields."""

    op: str
    tensors: dict
    numbers: dict
    outputs: dict  # new and contiguous, as a call of torch gives them
    flops: float = 0.0  # of ops that do not only move memory

    @property
    def line(self):
        """As `adze run` takes it."""
        words = [f"{name}={spec}" for name, spec in self.tensors.items()]
        return " ".join([self.op, *words, *(f"{name}={value:g}" for name, value in self.numbers.items())])

    @property
    def bytes(self):
        return sum(spec.bytes for spec in (*self.tensors.values(), *self.outputs.values()))

    @property
    def main(self):
        return self.tensors.get("x") or self.tensors["q"]

    @property
    def aligned(self):
        """All rows of all large tensors are aligned to 16 bytes."""
        large = [spec for spec in self.tensors.values() if spec.bytes * 4 >= self.main.bytes]
        return all(spec.aligned for spec in (*large, *self.outputs.values()))


class Draw:
    """One random call. A change in the order of its draws changes the calls of every seed."""

    def __init__(self, rng, limits=GPU):
        self.rng, self.limits = rng, limits
        self.dtype = rng.choice(["bf16", "bf16", "f16", "f32"])

    def chance(self, share):
        return self.rng.random() < share

    def between(self, low, high):
        """Log-uniform."""
        return round(math.exp(self.rng.uniform(math.log(low), math.log(high))))

    def length(self):
        """The length of a row: half are multiples of 8, a quarter even, a quarter odd."""
        n, kind = self.between(*self.limits.dim), self.rng.random()
        if kind < 0.5:
            return max(n // 8 * 8, self.limits.dim[0])
        return n // 2 * 2 + (2 if n // 2 % 4 == 0 else 0) if kind < 0.75 else n | 1

    def count(self, bytes_each):
        """The number of rows of bytes_each that gives the call the drawn size."""
        return max(1, round(self.between(*self.limits.bytes) / bytes_each))

    def offset(self, share):
        """A misalignment in elements, for a share of the draws; else 0."""
        per_vector = 16 // SIZES[self.dtype]
        return self.rng.randrange(1, per_vector) if self.chance(share) else 0

    def rows(self, *shape):
        """Contiguous rows, or rows of a wider tensor. The first element may be misaligned."""
        dim, lead = shape[-1], 1
        kind = self.rng.random()
        if kind > 0.6 and len(shape) > 1:
            pad = self.between(1, dim)
            lead = dim + (pad // 8 * 8 if kind < 0.8 else pad)
        stride = dense((*shape[:-1], lead)) if lead >= dim else dense(shape)
        return Spec(self.dtype, shape, stride, self.offset(0.25))

    def like(self, spec):
        """A second tensor of the same shape: half of the time laid out the same."""
        return spec if self.chance(0.5) else self.rows(*spec.shape)

    def vector(self, *shape):
        """A weight, a scale: of the call's dtype or f32."""
        dtype = "f32" if self.chance(0.2) else self.dtype
        return Spec(dtype, shape, dense(shape), self.offset(0.1) % (16 // SIZES[dtype]))

    def new(self, shape, dtype=None):
        return Spec(dtype or self.dtype, tuple(shape), dense(shape))

    def call(self, op, tensors, numbers, flops=0.0, **outputs):
        given = {name: spec for name, spec in tensors.items() if spec is not None}
        return Call(op, given, numbers, {name: self.new(shape) for name, shape in outputs.items()}, flops)

    # ---- The ops ----

    def norm(self, op):
        dim, heads = self.length(), self.chance(0.15)
        residual, modulated = self.chance(0.35), self.chance(0.4) and not heads
        if heads:  # of an attention layer: a norm of each
            dim = 8 * self.rng.randrange(4, 33)
        count = self.count(dim * SIZES[self.dtype] * (4 if residual else 2))
        shape = (max(1, count // 32), 32, dim) if heads else (count, dim)
        if modulated:
            batch = self.rng.choice([1, 1, 2, 4])
            shape = (batch, max(1, count // batch), dim)
        x = self.rows(*shape)
        tensors = {"x": x, "residual": self.like(x) if residual else None}
        affine = not modulated or self.chance(0.2)
        tensors["weight"] = self.vector(dim) if affine and self.chance(0.9) else None
        tensors["bias"] = self.vector(dim) if affine and op == "layer_norm" and self.chance(0.7) else None
        if modulated:
            tensors |= {"scale": self.vector(shape[0], 1, dim), "shift": self.vector(shape[0], 1, dim)}
        outputs = {"out": shape} | ({"sum": shape} if residual else {})
        return self.call(op, tensors, {"eps": EPS}, **outputs)

    def rms_norm(self):
        return self.norm("rms_norm")

    def layer_norm(self):
        return self.norm("layer_norm")

    def group_norm(self):
        channels, height, width = self.rng.choice(GROUP_SHAPES)
        groups = self.rng.choice([32, 32, 32, 16])
        most = self.limits.bytes[1] // (2 * channels * SIZES[self.dtype])
        height, width = (max(4, round(n * self.rng.choice([0.5, 0.75, 1, 1, 1.03, 1.25]))) for n in (height, width))
        while height * width > most:
            height, width = max(1, height // 2), max(1, width // 2)
        batch = min(self.rng.choice([1, 1, 2, 4, 8]), max(1, most // (height * width)))
        last = self.chance(0.5)
        shape = (batch, height, width, channels) if last else (batch, channels, height, width)
        x = Spec(self.dtype, shape, dense(shape), self.offset(0.25))
        tensors = {"x": x, "weight": self.vector(channels), "bias": self.vector(channels)}
        numbers = {"eps": EPS, "groups": groups, "channels_last": int(last), "act": 1 if self.chance(0.5) else 0}
        return self.call("group_norm", tensors, numbers, out=shape)

    def gated_add(self):
        dim, batch = self.length(), self.rng.choice([1, 1, 2, 4])
        shape = (batch, max(1, self.count(3 * dim * SIZES[self.dtype]) // batch), dim)
        x = self.rows(*shape)
        tensors = {"x": x, "residual": self.like(x), "gate": self.vector(batch, 1, dim)}
        return self.call("gated_add", tensors, {}, out=shape)

    def activation(self):
        dim = self.length()
        x = self.rows(self.count(2 * dim * SIZES[self.dtype]), dim)
        return self.call("activation", {"x": x}, {"act": self.rng.choice([1, 2, 3])}, out=x.shape)

    def glu(self):
        dim = self.length()
        shape = (self.count(3 * dim * SIZES[self.dtype]), dim)
        numbers = {"act": self.rng.choice([1, 1, 2, 3])}
        if self.chance(0.5):
            x = self.rows(*shape)
            return self.call("glu", {"x": x, "value": self.like(x)}, numbers, out=shape)
        numbers["value_first"] = int(self.chance(0.3))
        return self.call("glu", {"x": self.rows(shape[0], 2 * dim)}, numbers, out=shape)

    def softmax(self):
        dim = self.length()
        count = self.count(2 * dim * SIZES[self.dtype])
        masked = self.chance(0.3)
        numbers = {"scale": 0.125} if self.chance(0.5) else {}
        x = self.rows(*((1, count, dim) if masked else (count, dim)))
        return self.call(
            "softmax", {"x": x, "mask": self.vector(1, 1, dim) if masked else None}, numbers, out=x.shape
        )

    def heads(self):
        """q and k of an attention layer and their tables: [batch, seq, heads, dim] or [batch, heads, seq, dim], of
        their own memory or views of a fused QKV projection. Returns tensors, numbers and shapes of the outputs."""
        dim = 8 * self.rng.randrange(4, 33)
        q_heads = self.rng.choice([4, 8, 12, 16, 24, 28, 32, 40, 64])
        k_heads = self.rng.choice([n for n in (q_heads, q_heads // 2, q_heads // 4) if n])
        has_k, fused = self.chance(0.85), self.chance(0.4)
        rotary = dim if self.chance(0.6) else 2 * self.rng.randrange(8, dim // 2)
        if rotary < dim and self.chance(0.75):
            rotary = max(16, rotary // 16 * 16)
        batch = self.rng.choice([1, 1, 2, 4])
        each = 2 * dim * (q_heads + (k_heads if has_k else 0)) * SIZES[self.dtype]
        seq = max(1, self.count(each) // batch)
        first = self.chance(0.3)
        token = (q_heads + 2 * k_heads) * dim if fused else 0
        offset = self.offset(0.2)

        def part(heads, at):
            shape = (batch, heads, seq, dim) if first else (batch, seq, heads, dim)
            if not fused:
                return Spec(self.dtype, shape, dense(shape), offset)
            stride = (seq * token, dim, token, 1) if first else (seq * token, token, dim, 1)
            return Spec(self.dtype, shape, stride, (at + offset) % (16 // SIZES[self.dtype]))

        tensors = {"q": part(q_heads, 0), "k": part(k_heads, q_heads * dim) if has_k else None}
        columns = rotary if self.chance(0.5) else rotary // 2
        table = self.new((seq, columns), "f32" if self.chance(0.5) else self.dtype)
        numbers = {"pairs": int(self.chance(0.4)), "rotary_dim": rotary, "heads_first": int(first)}
        outputs = {name + "_out": spec.shape for name, spec in tensors.items() if spec}
        return tensors, {"cos": table, "sin": table}, numbers, outputs

    def rope(self):
        tensors, tables, numbers, outputs = self.heads()
        return self.call("rope", tensors | tables, numbers, **outputs)

    def qk_norm_rope(self):
        tensors, tables, numbers, outputs = self.heads()
        across = self.chance(0.25)
        weights = {}
        for name, spec in tensors.items():
            if spec:
                heads, dim = spec.shape[1 if numbers["heads_first"] else 2], spec.shape[3]
                weights[name + "_weight"] = self.vector(heads * dim if across else dim)
        numbers = {"eps": EPS, "across_heads": int(across)} | numbers
        return self.call("qk_norm_rope", tensors | weights | tables, numbers, **outputs)

    # ---- Products ----

    def side(self, low, high):
        """A side of a weight: half are multiples of 64, a quarter of 8, a quarter of nothing."""
        n, kind = self.between(low, high), self.rng.random()
        return max(64, n // 64 * 64) if kind < 0.5 else n // 8 * 8 if kind < 0.75 else n

    def weight(self, n, k, kind):
        """A weight and its scales: of x's dtype, or i8 with a scale for each row, or u4 with one for 128 columns."""
        size = k**-0.5
        if kind == "u4":
            scale = Spec(self.dtype, (n, -(-k // 128)), dense((n, -(-k // 128))), values="positive", size=size / 5)
            packed = (n, (k + 1) // 2)
            return Spec("u8", packed, dense(packed), values="bits"), scale
        if kind == "i8":
            return Spec("i8", (n, k), dense((n, k)), values="bits"), Spec("f32", (n,), (1,), 0, "positive", size / 73)
        return Spec(self.dtype, (n, k), dense((n, k)), size=size), None

    def gemm(self):
        """Products of a layer at 1 to 64 tokens, of x's dtype or with quantised weights."""
        m, n, k = self.between(1, 64), *(self.side(64, self.limits.side) for _ in range(2))
        kind = self.rng.choice(["x", "x", "x", "i8", "u4"])
        glu, act = self.chance(0.2), 3 if self.chance(0.15) else 0
        x = self.rows(m, k) if self.chance(0.3) else self.new((m, k))
        w, scale = self.weight(n, k, kind)
        tensors = {"x": x, "w": w, "w2": w if glu else None}
        tensors["bias"] = self.new((n,)) if self.chance(0.3) else None
        tensors["norm_weight"] = self.new((k,)) if self.chance(0.25) else None
        tensors["residual"] = self.new((m, n)) if self.chance(0.25) else None
        tensors |= {"w_scale": scale, "w2_scale": scale if glu else None}
        numbers = {"eps": EPS, "norm": 1} if tensors["norm_weight"] else {}
        numbers |= {"act": act} if act else {}
        numbers |= {"glu": 1} if glu else {}
        numbers |= {"group": 128, "format": 1} if kind == "u4" else {}
        return self.call("gemm", tensors, numbers | {"flags": 1}, 2.0 * m * n * k * (2 if glu else 1), out=(m, n))

    def attention(self):
        """A step of decoding, which has one query or a few, or a prompt: all its tokens, or the last of them."""
        decode = self.chance(0.5)
        dim = self.rng.choice([40, 64, 64, 80, 96, 128, 128, 128, 160, 256])
        heads = self.rng.choice([4, 8, 12, 16, 24, 32, 32, 40])
        kv_heads = self.rng.choice([heads, heads, *(heads // n for n in (2, 4, 8) if heads % n == 0)])
        batch = self.rng.choice([1, 1, 1, 2, 4, 8, 16, 32] if decode else [1, 1, 2, 4])
        least, most_decode, most_prompt = self.limits.keys
        n = self.between(least, most_decode if decode else most_prompt)
        if decode:
            n = max(1, min(n, self.limits.bytes[1] // (2 * batch * kv_heads * dim * SIZES[self.dtype])))
            m = 1 if self.chance(0.75) else self.rng.randrange(2, 17)
        else:
            most, each = self.limits.products, self.limits.q_bytes
            while batch * heads * n * n * dim > most or batch * heads * n * dim * SIZES[self.dtype] > each:
                n = max(1, n // 2)
            m = n if self.chance(0.8) else max(1, n // self.rng.randrange(2, 5))
        m = min(m, n)
        tokens_first = self.chance(0.6)  # [batch, tokens, heads, dim] in memory, as a projection leaves them

        def part(count, tokens):
            stride = (tokens * count * dim, dim, count * dim, 1) if tokens_first else None
            shape = (batch, count, tokens, dim)
            return Spec(self.dtype, shape, stride or dense(shape))

        tensors = {"q": part(heads, m), "k": part(kv_heads, n), "v": part(kv_heads, n)}
        numbers, kind = {}, self.rng.random()
        if kind < 0.5 and m > 1:
            numbers["causal"] = 1
            if kind < 0.1 and n > 2:
                numbers["window"] = self.between(2, n)
        elif kind > 0.8:
            shape = (batch, 1, m if kind > 0.9 else 1, n)
            mask = ("bool", shape, dense(shape), 0, "bits") if self.chance(0.5) else (self.dtype, shape, dense(shape))
            tensors["mask"] = Spec(*mask)
        flops = 4.0 * batch * heads * m * n * dim / (2 if numbers and m == n else 1)
        return self.call("attention", tensors, numbers, flops, out=(batch, heads, m, dim))


OPS = ("rms_norm", "layer_norm", "group_norm", "softmax", "activation", "glu", "rope", "qk_norm_rope", "gated_add")

PRODUCTS = ("gemm", "attention")  # which have other peers, and other limits than memory


def draws(seed, count, ops=OPS, limits=GPU):
    """Calls of all ops in turn. A call depends on the seed and its number, not on the count."""
    made = []
    for number in range(count):
        op = ops[number % len(ops)]
        made.append(getattr(Draw(random.Random(f"{seed} {number} {op}"), limits), op)())
    return made


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=[*OPS, *PRODUCTS])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="calls that are drawn (40)")
    parser.add_argument(
        "--megabytes", type=float, default=150, help="the most that a printed call reads and writes (150)"
    )
    options = parser.parse_args(words)
    for call in draws(options.seed, options.count, (options.op,)):
        if call.bytes <= options.megabytes * 1e6:
            print(call.line)


if __name__ == "__main__":
    main()
